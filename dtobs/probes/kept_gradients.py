"""Gradients that nobody zeroes: what one optimizer step has used is still there when the next backward adds to it.

Of each optimizer the beginning of one gradient is remembered when it has stepped. Before the backwards that follow it
is looked at again: where it is the same before the first one, and was gone before none of them, it was kept. A loop
that zeroes late, before the last of several backwards (GANs, adversarial inputs), or changes what it keeps, keeps none.
Nor does one whose optimizer holds master copies: no backward adds to their gradients, they are written anew.

And gradients that nobody uses: until an optimizer has stepped for the first time, it is counted how often
``Optimizer.zero_grad`` throws away what a backward has made. A loop that updates parameters by itself changes them.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from dtobs.probes.base import Probe
from dtobs.probes.layout import local_tensor

ELEMENTS = 64
IN_A_ROW = 4
"""Steps in a row in which it was kept, before it is written down."""
UNUSED = 16
"""Times that gradients are thrown away, with no step of any optimizer ever, before it is written down."""
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


class KeptGradients(Probe):
    """Writes a ``kept`` entry when an optimizer's gradients were kept in `IN_A_ROW` steps. Only on the host.

    Writes ``gradients_unused`` of the process: how often they were thrown away before any step; 0 once one came.
    """

    name = "kept gradients"
    about_optimizer = True

    def install(self) -> None:
        self._watched: dict[int, _Watched] = {}
        # By id of the optimizer: above 0 how often they were kept in a row, below 0 how often they were not.
        self._streaks: dict[int, int] = {}
        self._made, self._unused, self._said = False, 0, False
        self._before: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []
        if not self.context.progress.steps_seen:
            self.around(torch.optim.Optimizer, "zero_grad", self._zeroed, lambda _began: None, _not_traced)

    def remove(self) -> None:
        """Let go of the parameters."""
        self._watched, self._before = {}, []
        super().remove()

    def _zeroed(self, optimizer: torch.optim.Optimizer, *_args: object, **_named: object) -> None:
        """The gradients of `optimizer` are about to be thrown away."""
        context = self.context
        if not self._made or context.progress.steps_seen or optimizer not in context.watched_optimizers().values():
            return
        self._made = False
        self._unused += 1
        if self._unused == 1:
            trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self._before = [(weakref.ref(p), _values(p).clone()) for p in trained[:FEW]]
        elif self._unused == UNUSED and self._rests():
            self._said = True
            context.recorder.meta.add("process", gradients_unused=UNUSED)

    def _rests(self) -> bool:
        """Whether all parameters looked at are what they were. Waits for a device, once in the life of a job."""
        now = [(before, p) for known, before in self._before if (p := known()) is not None]
        same = all(torch.equal(_values(p), before) for before, p in now)
        return same and any(before.numel() for before, _ in now)

    def backward_begin(self, tensors: object) -> None:
        """Look whether what the last step used is still there."""
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
        self._made = True
        for watched in self._watched.values():
            parameter = watched.parameter()
            now = _beginning(parameter) if watched.kept and parameter is not None else None
            watched.added = watched.added or (now is not None and not torch.equal(now, watched.used))

    def after_optimizer(self) -> None:
        """Judge the steps of the optimizer that has stepped, and remember what it used."""
        optimizer = self.context.stepping
        if optimizer is None:
            return
        if self._said:
            self._said = False
            self.context.recorder.meta.add("process", gradients_unused=0)
        self._before = []
        key = id(optimizer)
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
