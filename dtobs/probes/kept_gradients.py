"""Gradients that nobody zeroes: what one optimizer step has used is still there when the next backward adds to it.

Of each optimizer the beginning of one gradient is remembered when it has stepped. Before the backwards that follow it
is looked at again: where it is the same before the first one, and was gone before none of them, it was kept. A loop
that zeroes late, before the last of several backwards (GANs, adversarial inputs), or changes what it keeps, keeps none.
Nor does one whose optimizer holds master copies: no backward adds to their gradients, they are written anew.

And gradients that nobody uses: until an optimizer has stepped for the first time, it is counted how often what a
backward has made is thrown away, by its ``zero_grad`` or in another way before the next backward. A loop that updates
parameters by itself changes them. Where other optimizers step meanwhile, more is needed: a loop may begin with the
steps of one of them.

And steps without gradients: backwards go on, and none of them reaches a parameter of any optimizer that steps, though
they did before. What the optimizer holds is no longer the model that trains.

And clipping that comes too late or too early: after the step of the optimizer that holds what is clipped, and before
any backward makes new gradients. Of loops that make gradients otherwise (``torch.autograd.grad``) nothing is said.
"""

from __future__ import annotations

import itertools
import math
import weakref
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dtobs.probes.base import Probe
from dtobs.probes.layout import local_tensor, model_tensors

ELEMENTS = 64
IN_A_ROW = 4
"""Steps in a row in which it was kept, before it is written down."""
UNUSED, UNUSED_BESIDE = 16, 40
"""Times that an optimizer's gradients are thrown away before its first step, before it is written down: by itself while
none has stepped, and otherwise, or while another one steps.
"""
STARVED = 16
"""Steps in a row in which no optimizer was given any gradient, before it is written down."""
FEW = 8
"""Parameters that are looked at to see whether something else than an optimizer changes them."""
QUIET = 8
"""Steps in a row in which it was not, after which an optimizer is left alone."""


@dataclass
class _Watched:
    """What one optimizer has used in its last step, and what became of it."""

    parameter: weakref.ref[torch.Tensor]
    name: str
    used: torch.Tensor
    added: bool = False  #: whether a backward has added to it since that step
    kept: bool | None = None  #: since that step: None before any backward, False once it was gone or another
    backwards: int = 0


@dataclass
class _Idle:
    """An optimizer that has never stepped: how often its gradients were thrown away, the last time after `backwards`.

    `before` are parameters as they were at the first time.
    """

    times: int = 0
    backwards: int = 0
    before: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = field(default_factory=list)
    made: list[weakref.ref[torch.Tensor]] = field(default_factory=list)  #: with gradients after the last backward
    said: str = ""  #: the field of the process in which it was written down

    def rests(self) -> bool:
        """Whether all parameters looked at are what they were. Waits for a device, once in the life of a job."""
        now = [(before, p) for known, before in self.before if (p := known()) is not None]
        same = all(torch.equal(_values(p), before) for before, p in now)
        return same and any(before.numel() for before, _ in now)


@dataclass
class _Clipping:
    """Of one optimizer: how many backwards there had been when it stepped last, and the clippings since then."""

    backwards: int
    idle: float | None = None  #: the largest norm of one that came before any backward
    timely: bool = False
    streak: int = 0  #: steps in a row in which all came so; -1 once one came in time, and no more is asked


class KeptGradients(Probe):
    """Writes a ``kept`` entry when an optimizer's gradients were kept in `IN_A_ROW` steps. Only on the host.

    Writes ``gradients_unused`` of the process: how often they were thrown away before any step; 0 once one came. And
    ``optimizer_unused``: the name of an optimizer that never steps while others do, and of its first parameter. And
    ``clipped_idly``: the step and the largest norm where `IN_A_ROW` steps were clipped between a step and a backward.
    And ``starved``: the first of `STARVED` steps in a row that had backwards and no gradients, and the name of the
    optimizer; none once there are gradients again.
    """

    name = "kept gradients"
    about_optimizer = True

    def install(self) -> None:
        self._watched: dict[int, _Watched] = {}
        # By id of the optimizer: above 0 how often they were kept in a row, below 0 how often they were not.
        self._streaks: dict[int, int] = {}
        self._backwards = 0
        # By id of the optimizer, while it has not stepped: None once it has.
        self._idle: dict[int, _Idle | None] = {}
        self._clippings: dict[int, _Clipping] = {}  # by id of the optimizer, once it has stepped
        self._fed_by: weakref.ref[torch.Tensor] | None = None  # a parameter that had a gradient in a step
        self._fed = True  # whether an optimizer had any since the last step ended
        self._stepped, self._seen = "", 0  # the optimizer that stepped since then, and the backwards until then
        self._starved = 0
        self._others = ExitStack()  # while it is so, hears of optimizers that are not watched
        self.undo.callback(self._others.close)
        clipping = self.guard(self._clipping)
        self.context.on_clipping.append(clipping)
        self.undo.callback(self.context.on_clipping.remove, clipping)
        if not self.context.progress.steps_seen or len(self.context.optimizers) > 1:
            self.around(torch.optim.Optimizer, "zero_grad", self._zeroed, lambda _began: None, _not_traced)

    def remove(self) -> None:
        """Let go of the parameters."""
        self._watched, self._idle, self._clippings = {}, {}, {}
        super().remove()

    def _zeroed(self, optimizer: torch.optim.Optimizer, *_args: object, **_named: object) -> None:
        """The gradients of `optimizer` are about to be thrown away."""
        idle = self._idle.setdefault(id(optimizer), _Idle())
        if idle is None or idle.said or idle.backwards == self._backwards:
            return
        idle.backwards = self._backwards
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if trained and optimizer in self.context.watched_optimizers().values():
            self._thrown_away(optimizer, idle, trained, zeroed=True)

    def _thrown_away(
        self, optimizer: torch.optim.Optimizer, idle: _Idle, trained: list[torch.Tensor], *, zeroed: bool = False
    ) -> None:
        """The gradients of `trained` are; with `zeroed`, by the optimizer itself."""
        context, beside = self.context, bool(self.context.progress.steps_seen)
        idle.times += 1
        if idle.times == 1:
            idle.before = [(weakref.ref(p), _values(p).clone()) for p in trained[:FEW]]
        elif idle.times == (UNUSED if zeroed else UNUSED_BESIDE) and not beside and idle.rests():
            idle.said = "gradients_unused"
            context.recorder.meta.add("process", gradients_unused=idle.times)
        elif idle.times == UNUSED_BESIDE and beside and idle.rests() and _any(trained[:FEW]):
            idle.said = "optimizer_unused"
            named = {id(t.tensor): t.name for t in model_tensors(context.model)} if context.model is not None else {}
            first = next((named[id(p)] for p in trained if id(p) in named), "parameters of no watched model")
            context.recorder.meta.add("process", optimizer_unused=[type(optimizer).__name__, first, UNUSED_BESIDE])

    def _clipping(self, parameters: Any, max_norm: Any) -> None:
        """The gradients of `parameters` are about to be clipped: is there a backward since their optimizer's step?"""
        if not isinstance(parameters, (list, tuple)) or not isinstance(max_norm, (int, float)):
            return
        settled = all(not 0 <= known.streak < IN_A_ROW for known in self._clippings.values())
        if settled or not parameters or not math.isfinite(max_norm):
            return
        for optimizer in self.context.watched_optimizers().values():
            known = self._clippings.get(id(optimizer))
            if known is None or id(parameters[0]) not in self.context.trained_by(optimizer):
                continue
            if known.backwards == self._backwards:
                known.idle = float(max_norm)
            else:
                known.timely = True

    def _judge_clipping(self, key: int) -> None:
        """An optimizer has stepped."""
        known = self._clippings.setdefault(key, _Clipping(self._backwards))
        if known.timely:
            known.streak = -1
        elif known.idle is not None and known.backwards < self._backwards and 0 <= known.streak < IN_A_ROW:
            known.streak += 1
            if known.streak == IN_A_ROW:
                self.context.recorder.meta.add("process", clipped_idly=[self.context.step, known.idle])
        known.backwards, known.idle, known.timely = self._backwards, None, False

    def _look_for_thrown_away(self) -> None:
        """Before any optimizer has stepped: whether what the last backward made is gone, without a ``zero_grad``."""
        for optimizer in self.context.watched_optimizers().values():
            idle = self._idle.get(id(optimizer))
            if idle is None or idle.said or not idle.made or idle.backwards == self._backwards:
                continue
            idle.backwards = self._backwards
            trained = [p for known in idle.made if (p := known()) is not None]
            if all(p.grad is None or ((now := _beginning(p)) is not None and not now.any()) for p in trained):
                self._thrown_away(optimizer, idle, trained)

    def _remember_made(self) -> None:
        """Before any optimizer has stepped: which parameters have gradients now."""
        for optimizer in self.context.watched_optimizers().values():
            idle = self._idle.setdefault(id(optimizer), _Idle())
            if idle is not None and not idle.made:
                trained = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
                idle.made = [weakref.ref(p) for p in itertools.islice(trained, FEW)]

    def backward_begin(self, tensors: object) -> None:
        """Look whether what the last step used is still there."""
        if not self.context.progress.steps_seen:
            self._look_for_thrown_away()
        for watched in self._watched.values():
            if watched.kept is False:
                continue
            parameter = watched.parameter()
            now = _beginning(parameter) if parameter is not None else None
            gone = now is None or not bool(now.any())
            first = watched.backwards == 0
            watched.backwards += 1
            watched.kept = not gone and (not first or torch.equal(now, watched.used))  # type: ignore[arg-type]

    def backward_end(self) -> None:
        """See whether the backward has added to what was kept."""
        self._backwards += 1
        if not self.context.progress.steps_seen:
            self._remember_made()
        for watched in self._watched.values():
            parameter = watched.parameter()
            now = _beginning(parameter) if watched.kept and parameter is not None else None
            watched.added = watched.added or (now is not None and not torch.equal(now, watched.used))

    def before_optimizer(self) -> None:
        """Look whether the optimizer has any gradient to step with."""
        optimizer = self.context.stepping
        if optimizer is None or self._fed:
            return
        self._stepped = type(optimizer).__name__
        known = self._fed_by() if self._fed_by is not None else None
        if known is not None and known.grad is not None:
            self._fed = True
            return
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None:
                self._fed, self._fed_by = True, weakref.ref(parameter)
                return

    def step_end(self) -> None:
        """Count the steps in a row that had backwards, and no gradients for the optimizers that stepped."""
        meta, fed = self.context.recorder.meta, self._fed
        backwards, stepped = self._backwards - self._seen, self._stepped
        self._fed, self._stepped, self._seen = False, "", self._backwards
        if fed:
            if self._starved >= STARVED:
                meta.add("process", starved=[])
            self._starved = 0
            self._others.close()
        elif backwards and stepped and self._fed_by is not None:
            self._starved += 1
            if self._starved == 1:
                self._others.callback(register_optimizer_step_pre_hook(self.guard(self._another_steps)).remove)
            if self._starved == STARVED and self._wants_gradients():
                meta.add("process", starved=[self.context.step - STARVED + 1, stepped])

    def _another_steps(self, optimizer: torch.optim.Optimizer, *_args: object, **_named: object) -> None:
        """One that is not watched, and has gradients: the loop trains something else now."""
        trains = any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
        self._fed = self._fed or trains

    def _wants_gradients(self) -> bool:
        """Whether some parameter of an optimizer still is to be trained."""
        optimizers = self.context.watched_optimizers().values()
        return any(p.requires_grad for o in optimizers for group in o.param_groups for p in group["params"])

    def after_optimizer(self) -> None:
        """Judge the steps of the optimizer that has stepped, and remember what it used."""
        optimizer = self.context.stepping
        if optimizer is None:
            return
        key = id(optimizer)
        self._judge_clipping(key)
        for number, idle in self._idle.items():
            if idle is not None and (idle.said == "gradients_unused" or (idle.said and number == key)):
                self.context.recorder.meta.add("process", **{idle.said: 0})
                idle.said = ""
        self._idle[key] = None
        streak = self._streaks.get(key, 0)
        if abs(streak) >= max(IN_A_ROW, QUIET):
            return
        before = self._watched.pop(key, None)
        if before is not None and before.kept is not None:
            streak = max(streak, 0) + 1 if before.kept and before.added else min(streak, 0) - 1
            self._streaks[key] = streak
            if streak == IN_A_ROW:
                self.context.recorder.meta.add("kept", parameter=before.name, step=self.context.step)
                self._streaks[key] = max(IN_A_ROW, QUIET)
                return
        model = self.context.model
        named = {id(p): name for name, p in model.named_parameters()} if model is not None else {}
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if id(p) in named):
            used = _beginning(parameter)
            if used is not None and bool(used.any()):
                self._watched[key] = _Watched(weakref.ref(parameter), named[id(parameter)], used.clone())
                return
        self._streaks[key] = min(streak, 0) - 1  # nothing to look at, as on a device: it is not sought for ever


def _any(parameters: list[torch.Tensor]) -> bool:
    """Whether one of the gradients is not zero. Waits for a device, as `_Idle.rests` does."""
    return any(bool(local_tensor(p.grad).any()) for p in parameters if p.grad is not None)


def _not_traced(*_args: object, **_named: object) -> bool:
    return not torch.compiler.is_compiling()


def _values(parameter: torch.Tensor) -> torch.Tensor:
    """The first elements of a parameter; none where they do not lie one after the other."""
    local = local_tensor(parameter)
    if local.layout is not torch.strided or not local.is_contiguous():
        return local.new_empty(0)
    return local.view(-1)[:ELEMENTS]


def _beginning(parameter: torch.Tensor) -> torch.Tensor | None:
    """The first elements of its gradient; None where there is none, or none that can be read without waiting."""
    gradient = parameter.grad
    if gradient is None:
        return None
    local = local_tensor(gradient).detach()
    if not local.is_cpu or local.layout is not torch.strided or not local.is_contiguous():
        return None
    return local.view(-1)[:ELEMENTS]
