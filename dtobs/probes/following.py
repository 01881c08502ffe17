"""Optimizers and models that nobody named: found when they are first used, and followed or said not to be.

An optimizer over parameters of a watched model trains that model: it is followed from its first step on, in place of
an earlier one over the same parameters. So is another one whose model is wrapped in DDP or FSDP, so that every rank
trains it, and in a job of one rank one that goes on stepping while no followed one does. Of the rest it is only said
that they step unobserved: one rank alone may step them, and its steps would no longer be those of the others.

A model is looked for as long as a followed optimizer has parameters that are in no watched model, and not for ever.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dtobs.probes.base import Probe
from dtobs.probes.layout import Bare, is_fsdp, wrappers
from dtobs.probes.modules import compiler_is_there, contained, untraced

SEARCH_STEPS = 64
"""Steps for which a model is looked for: the search costs something in each call of any module."""
PATIENCE = 8
"""Steps of an optimizer over unknown parameters before it is told of, or followed."""
MOST_TOLD = 8
MOST_BARE = 64
"""Parameters in no module that are watched: of more, nobody has forgotten a few."""


class Following(Probe):
    """Follows optimizers and models that turn up later; writes ``unobserved`` entries of those that it leaves."""

    name = "following"
    about_model = False

    def __init__(self) -> None:
        super().__init__()
        self.follow: Callable[[int, Any, Any], None] = lambda place, optimizer, model: None  #: set by the session
        self._strangers: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        self._displaced: weakref.WeakSet[Any] = weakref.WeakSet()
        self._places: list[set[int]] = []  # by place among the followed: the parameters
        self._known: dict[int, weakref.ref[Any]] = {}  # optimizers by id: those that need no second thought
        self._sought: dict[int, weakref.ref[Any]] = {}  # parameters of no model yet: the optimizer of each
        self._looked_at: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._search: Any = None
        self._search_until = 0
        self._told = 0

    def install(self) -> None:
        """Watch every optimizer's step; look for the models of those that are followed."""
        self._known, self._places = {}, []
        self._listen()
        self.look_for_models()

    def _listen(self) -> None:
        self._compiler = compiler_is_there()
        self.undo.callback(register_optimizer_step_pre_hook(untraced(self.guard(self._steps))).remove)

    def backward_begin(self, tensors: Any) -> None:
        """Listen anew where a compiler has turned up since; torch is calling no hook of an optimizer now."""
        if not (self._compiler or self.context.steps_open) and compiler_is_there():
            self.undo.close()
            self._listen()

    def remove(self) -> None:
        """Let go of everything."""
        self._end_search()
        self._known, self._sought = {}, {}
        super().remove()

    def step_begin(self) -> None:
        """Give the search up after a while."""
        if self._search is not None and self.context.step > self._search_until:
            self._end_search()

    def _steps(self, optimizer: Any, _args: Any, _named: Any) -> None:
        """Before any step of any optimizer; torch has not yet looked at the optimizer's own hooks."""
        known = self._known.get(id(optimizer))
        if (known is not None and known() is optimizer) or self.context.steps_open:
            return  # one that another wraps is not seen by itself
        context = self.context
        if contained(optimizer):
            self._known[id(optimizer)] = weakref.ref(optimizer)
            return  # those that it calls are followed
        self._watch_bare(optimizer)
        if not any(each() is optimizer for each in context.optimizers):
            parameters = context.trained_by(optimizer)
            if not (parameters & self._held() or self._goes_on_alone(optimizer, parameters)):
                return
            self._take(optimizer, parameters)
        self._known[id(optimizer)] = weakref.ref(optimizer)
        self.look_for_models()

    def _take(self, optimizer: Any, parameters: set[int]) -> None:
        """Follow it, in the place of one that it replaces."""
        self._note_places()
        places, optimizers = self._places, self.context.optimizers
        place = len(places)
        if optimizer not in self._displaced and parameters in places:
            place = places.index(parameters)
            earlier = optimizers[place]()
            if earlier is not None:
                self._displaced.add(earlier)
                self._known.pop(id(earlier), None)
        places[place : place + 1] = [parameters]
        self.follow(place, optimizer, None)

    def _note_places(self) -> None:
        """While they live: which parameters the followed optimizers have."""
        for known in self.context.optimizers[len(self._places) :]:
            optimizer = known()
            self._places.append(self.context.trained_by(optimizer) if optimizer is not None else set())

    def _goes_on_alone(self, optimizer: Any, parameters: set[int]) -> bool:
        """Whether this one over unknown parameters is what the job is about now, as far as one rank can tell."""
        context = self.context
        seen = self._strangers.setdefault(optimizer, [0, 0, 0])  # steps, those in a row, watched steps at the last
        seen[0] += 1
        seen[1] = seen[1] + 1 if seen[2] == context.progress.steps_seen else 1
        seen[2] = context.progress.steps_seen
        if seen[0] == 1 and context.world_size > 1:
            self._sought |= dict.fromkeys(parameters, weakref.ref(optimizer))
            self._begin_search()
        if context.world_size == 1 and seen[1] >= PATIENCE:
            return True
        if seen[0] == PATIENCE:
            self._say(optimizer, len(parameters))
        return False

    def _held(self) -> set[int]:
        model = self.context.model
        return {id(p) for p in model.parameters()} if model is not None else set()

    def _say(self, optimizer: Any, count: int) -> None:
        if self._told < MOST_TOLD:
            self._told += 1
            self.context.recorder.meta.add(
                "unobserved",
                what=f"{type(optimizer).__name__} of {count} parameters",
                step=self.context.step,
                why="its parameters are in no model that is watched: name both to session.watch(model, optimizer)",
            )

    def _watch_bare(self, optimizer: Any) -> None:
        """Watch what has a gradient for the first step of this one and lies in no module that was called."""
        trained, held = [p for group in optimizer.param_groups for p in group["params"]], self._held()
        if not any(id(p) in held for p in trained):
            return  # it trains copies of parameters, as of those in half precision
        sought = {f"parameter {n}": p for n, p in enumerate(trained) if id(p) in self._sought and p.grad is not None}
        if 0 < len(sought) <= MOST_BARE and all(p.requires_grad and p.is_leaf for p in sought.values()):
            mine = {id(p) for p in sought.values()}
            self._sought = {key: ref for key, ref in self._sought.items() if key not in mine}
            if not self._sought:
                self._end_search()
            self.follow(-1, None, Bare(sought))

    def look_for_models(self) -> None:
        """Which parameters of followed optimizers are in no watched model."""
        self._note_places()
        context, held = self.context, self._held()
        for known in context.optimizers:
            optimizer = known()
            if optimizer is not None:
                self._sought |= dict.fromkeys(context.trained_by(optimizer) - held, known)
        if self._sought:
            self._begin_search()

    def _begin_search(self) -> None:
        self._search_until = self.context.step + SEARCH_STEPS
        if self._search is None:
            self._search = register_module_forward_pre_hook(self.guard(self._forward))

    def _end_search(self) -> None:
        handle, self._search, self._sought = self._search, None, {}
        if handle is not None:
            handle.remove()

    def _forward(self, module: torch.nn.Module, _inputs: Any) -> None:
        """Before the forward of any module, the outermost first: is it one that is sought?"""
        if torch.compiler.is_compiling() or module in self._looked_at:
            return
        self._looked_at.add(module)
        mine = {id(p) for p in module.parameters()} & self._sought.keys()
        if not mine:
            return
        optimizer = self._sought[next(iter(mine))]()
        context = self.context
        followed = any(known() is optimizer for known in context.optimizers)
        if optimizer is None or not (followed or _on_every_rank(module)):
            return
        self._sought = {key: ref for key, ref in self._sought.items() if key not in mine}
        if not self._sought:
            self._end_search()
        if not followed:
            self._take(optimizer, context.trained_by(optimizer))
            self._known[id(optimizer)] = weakref.ref(optimizer)
        self.follow(-1, None, module)


def _on_every_rank(module: torch.nn.Module) -> bool:
    return bool(wrappers(module)) or any(is_fsdp(part) for part in module.modules())
