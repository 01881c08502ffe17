"""Forward of the root module and the optimizer's step, seen from outside.

The root module is seen through its class's ``__call__`` rather than through hooks: hooks live in the module's own
dictionary, so they would be copied with ``deepcopy(model)``, break its pickling and be traced by ``model.compile()``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from dtobs.events import Phase
from dtobs.probes.base import Probe


class Forward(Probe):
    """Forward begins and ends when the root module is called; one that trains nothing counts as validation."""

    name = "forward"

    def install(self) -> None:
        context = self.context
        if context.model is None:
            return
        self._progress = context.progress
        for number, root in enumerate(roots(context.model)):
            # Every micro-batch goes through all of them: it counts once.
            around_call(self, root, self._begin_first if number == 0 else self._begin, self._progress.end)

    def _begin_first(self, root: torch.nn.Module, *_args: Any, **_named: Any) -> int:
        depth = self._begin(root)
        self._progress.micro_batches += trains(root)
        return depth

    def _begin(self, root: torch.nn.Module, *_args: Any, **_named: Any) -> int:
        progress = self._progress
        if not trains(root):
            return progress.begin(Phase.VALIDATION)
        progress.claim_training_thread()
        return progress.begin(Phase.FORWARD)


def roots(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that the loop calls: `model`, or each of a ModuleList, such as a rank's stages of a pipeline."""
    return list(model) if isinstance(model, torch.nn.ModuleList) and len(model) else [model]


def trains(root: torch.nn.Module) -> bool:
    """Whether a forward now is for a gradient. Lightning keeps its wrapper, and only that, in evaluation mode."""
    return torch.is_grad_enabled() and (root.training or any(child.training for child in root.children()))


def around_call(probe: Probe, module: torch.nn.Module, begin: Callable[..., Any], end: Callable[..., object]) -> None:
    """Call `begin(module, its arguments)` and `end(what begin returned)` around each call of `module`."""
    reference = weakref.ref(module)

    def when(called: torch.nn.Module, *_args: Any) -> bool:
        # While a compiler traces, only the call itself may be seen; other modules of this class are not the root.
        return not torch.compiler.is_compiling() and reference() is called

    probe.around(type(module), "__call__", begin, end, when)


class OptimizerSteps(Probe):
    """The optimizer's step is a phase; when it has stepped, the step ends unless the user says where steps end.

    `before` and `after` are what other probes do around it.
    """

    name = "optimizer"

    def __init__(self) -> None:
        super().__init__()
        self._depth: int | None = -1
        self.before: list[Callable[[], object]] = []
        self.after: list[Callable[[], object]] = []

    def install(self) -> None:
        optimizer = self.context.optimizer
        if optimizer is None:
            return
        begin, end = self.guard(self._begin), self.guard(self._end)
        ended = self.guard(self.context.progress.optimizer_stepped)

        def before(optimizer: Any, args: Any, kwargs: Any) -> None:
            for hook in self.before:
                hook()
            begin()

        def after(optimizer: Any, args: Any, kwargs: Any) -> None:
            end()
            for hook in self.after:
                hook()
            ended()

        if hasattr(optimizer, "_optimizer_step_pre_hooks"):
            self.undo.callback(optimizer.register_step_pre_hook(before).remove)
            self.undo.callback(optimizer.register_step_post_hook(after).remove)
            return

        def begin_call(*_args: Any, **_named: Any) -> bool:
            before(None, None, None)
            return True

        # One that wraps another without a hook of its own. Its class, not itself: schedulers want a method there.
        mine = weakref.ref(optimizer)
        self.around(
            type(optimizer),
            "step",
            begin_call,
            lambda _began: after(None, None, None),
            lambda called, *_args: mine() is called,
        )

    def _begin(self) -> None:
        context = self.context
        self._depth = context.progress.begin(Phase.OPTIMIZER)
        if context.optimizer is not None:
            rate = context.optimizer.param_groups[0].get("lr")
            if isinstance(rate, torch.Tensor) and not rate.is_cpu:
                step = context.step
                self.late.put(
                    rate.reshape(()), lambda value: context.recorder.amend_step(step, learning_rate=value.item())
                )
            elif rate is not None:
                context.record["learning_rate"] = float(rate)

    def _end(self) -> None:
        if self._depth is not None:
            self.context.progress.end(self._depth)
