"""Backward: when it begins, when the last local gradient is ready, when it returns.

What lies between the last gradient and the return is the reducer waiting for other ranks (DDP's and FSDP's final
callbacks): communication that nothing hides. A callback queued before theirs marks its begin.

``torch.autograd.backward`` is replaced, which ``Tensor.backward`` and pipeline stages call by that name. The queue of
final callbacks is private torch (`_queue_callback`, tried with 2.13): without it the interval is not seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtobs.events import Phase
from dtobs.probes.base import Probe


def _queue_callback() -> Callable[[Callable[[], None]], None] | None:
    """Autograd's way to run something when the graph is done; None where this torch has none. Tried: torch 2.13."""
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    return getattr(engine, "queue_callback", None)


class Backward(Probe):
    """Wraps ``torch.autograd.backward``. The final wait is for the collective that this thread issued last."""

    name = "backward"
    about_model = False

    def __init__(self) -> None:
        super().__init__()
        self.before: list[Callable[[Any], object]] = []  #: what other probes do when an outermost backward begins
        self.after: list[Callable[[], object]] = []

    def install(self) -> None:
        self._progress, self._last_issued = self.context.progress, self.context.last_issued
        self._running = self._waiting = self._elsewhere = False
        self._inside = 0
        self._queue = _queue_callback() if self.context.world_size > 1 else None
        self._graph_done = self.guard(self._wait)
        self.around(torch.autograd, "backward", self._begin, self._end)

    def _begin(self, tensors: Any, *_args: Any, **_named: Any) -> tuple[int, Any] | None:
        if _on_paper(tensors):
            return None
        depth = self._progress.begin(Phase.BACKWARD)
        self._inside += 1
        if self._inside == 1 and not self.context.rehearsing:
            for hook in self.before:
                hook(tensors)
        handle = None
        if depth >= 0 and self._queue is not None and not self._running and self._progress.host_waits:
            node = _grad_fn(tensors)
            if node is not None and not compiled_autograd():
                handle = node.register_prehook(self._on_first_gradient)
                self._running = True
        return depth, handle

    def _on_first_gradient(self, _: Any) -> None:
        # Queued before DDP and FSDP queue theirs; callbacks run in that order.
        if self.active and self._queue is not None:
            self._queue(self._graph_done)

    def _wait(self) -> None:
        self._waiting = True
        group, seq = self._last_issued()
        # On a device the graph is run by a thread of autograd's own, on the streams of the one that called it.
        self._elsewhere = threading.get_ident() != self._progress.thread and self._progress.stream_waits(group)
        self._progress.wait_begin(group, seq)

    def _end(self, token: tuple[int, Any]) -> None:
        depth, handle = token
        self._inside -= 1
        if not self._inside and not self.context.rehearsing:
            for hook in self.after:
                hook()
        if handle is not None:
            handle.remove()
            self._running = False
        if self._waiting:
            self._waiting = False
            if self._elsewhere:
                self._progress.stream_goes_on()
            self._progress.wait_end(*self._last_issued())
        self._progress.end(depth)


def _on_paper(tensors: Any) -> bool:
    """Whether it trains nothing: a program counts its operations with tensors that have no numbers (device "meta")."""
    given = tensors if isinstance(tensors, Sequence) else (tensors,)
    return any(isinstance(tensor, torch.Tensor) and tensor.is_meta for tensor in given)


def _grad_fn(tensors: Any) -> Any:
    if isinstance(tensors, torch.Tensor):
        return tensors.grad_fn
    if isinstance(tensors, Sequence):
        return next((t.grad_fn for t in tensors if isinstance(t, torch.Tensor) and t.grad_fn is not None), None)
    return None


def compiled_autograd() -> bool:
    """Whether the backward graph itself is being compiled: a hook on it would be traced."""
    import sys

    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "compiled_autograd_enabled", False))
