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
from dtobs.probes.base import Context, Probe
from dtobs.probes.progress import Progress


class Forward(Probe):
    """Forward begins and ends when the root module is called; evaluation mode counts as validation."""

    name = "forward"

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self._undo: list[Callable[[], None]] = []

    def install(self, context: Context) -> None:
        if context.model is None:
            return
        end = context.guard(self, self._progress.end)
        for number, root in enumerate(roots(context.model)):
            # Every micro-batch goes through all of them: it counts once.
            begin = context.guard(self, self._begin_first if number == 0 else self._begin)
            self._undo.append(wrap_call(root, begin, end))

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _begin_first(self, training: bool) -> int:
        depth = self._begin(training)
        self._progress.micro_batches += training
        return depth

    def _begin(self, training: bool) -> int:
        progress = self._progress
        if not training:
            return progress.begin(Phase.VALIDATION)
        progress.adopt()
        return progress.begin(Phase.FORWARD)


def roots(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that the loop calls: `model`, or each of a ModuleList, such as a rank's stages of a pipeline."""
    return list(model) if isinstance(model, torch.nn.ModuleList) and len(model) else [model]


def wrap_call(
    model: torch.nn.Module,
    begin: Callable[[bool], int | None],
    end: Callable[[int], object],
    inputs: Callable[[tuple[Any, ...], dict[str, Any]], object] | None = None,
) -> Callable[[], None]:
    """Call `begin(training)` and `end(what begin returned)` around each call of `model`; returns the undo.

    `inputs` is given the arguments of the call before `begin`.
    """
    kind = type(model)
    before = kind.__dict__.get("__call__")
    original = kind.__call__
    root = weakref.ref(model)

    def __call__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        # While a compiler traces, only the call itself may be seen; other modules of this class are not the root.
        if torch.compiler.is_compiling() or root() is not self:
            return original(self, *args, **kwargs)
        if inputs is not None:
            inputs(args, kwargs)
        token = begin(self.training)
        try:
            return original(self, *args, **kwargs)
        finally:
            if token is not None:
                end(token)

    kind.__call__ = __call__  # type: ignore[method-assign]

    def undo() -> None:
        if kind.__dict__.get("__call__") is not __call__:
            return  # somebody wrapped it after us: taking ours out would take theirs out as well
        if before is None:
            del kind.__call__
        else:
            kind.__call__ = before  # type: ignore[method-assign]

    return undo


class OptimizerSteps(Probe):
    """The optimizer's step is a phase; when it has stepped, the step ends unless the user says where steps end.

    `before` and `after` are what other probes do around it.
    """

    name = "optimizer"

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self._handles: list[Any] = []
        self._depth: int | None = -1
        self.before: list[Callable[[], object]] = []
        self.after: list[Callable[[], object]] = []

    def install(self, context: Context) -> None:
        optimizer = context.optimizer
        if optimizer is None:
            return
        begin, end = context.guard(self, self._begin), context.guard(self, self._end)

        def before(optimizer: Any, args: Any, kwargs: Any) -> None:
            for hook in self.before:
                hook()
            begin()

        def after(optimizer: Any, args: Any, kwargs: Any) -> None:
            end()
            for hook in self.after:
                hook()
            ended()

        ended = context.guard(self, self._progress.optimizer_stepped)
        self._context = context
        self._handles.append(optimizer.register_step_pre_hook(before))
        self._handles.append(optimizer.register_step_post_hook(after))

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _begin(self) -> None:
        context = self._context
        self._depth = self._progress.begin(Phase.OPTIMIZER)
        if context.optimizer is not None:
            rate = context.optimizer.param_groups[0].get("lr")
            if isinstance(rate, float):  # a tensor may live on a device; the loop can report it
                context.record["learning_rate"] = rate

    def _end(self) -> None:
        if self._depth is not None:
            self._progress.end(self._depth)
