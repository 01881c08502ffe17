"""Values that a device still computes, handed over without waiting for it."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

if TYPE_CHECKING:
    import torch

MAX_PENDING = 64
Then = Callable[[npt.NDArray[Any]], object]


def capturing() -> bool:
    """Whether a graph is being captured on the current stream: what is issued there runs again at every replay, and to
    ask for an event ends the capture. Makes no context of a device where the process has none.
    """
    import torch

    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def capture_test() -> Callable[[], bool]:
    """What asks as `capturing` does, for hooks that run many times a step; private torch where it has that."""
    import torch

    initialized, public = torch.cuda.is_initialized, torch.cuda.is_current_stream_capturing
    asks: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", public)
    return lambda: initialized() and asks()  # type: ignore[no-untyped-call]


def keep_for_good(thing: object) -> None:
    """Never free `thing`. In a fork, to free what its parent's device made (an event, a Work, pinned memory) ends the
    process: that asks for the device, which a fork has not, in a destructor, which may not raise.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


class Arrived:
    """Stands where an event does, for what is to be called once all that was put before it has been handed over."""

    def query(self) -> bool:
        """It has passed."""
        return True


class Deferred:
    """Calls back once a device has reached a point: a step or so later. Nothing here synchronises; `poll` only asks.

    What piles up beyond `most` is dropped and counted.
    """

    def __init__(self, most: int = MAX_PENDING) -> None:
        self._pending: deque[tuple[Any, Callable[[], object]]] = deque()
        self._most = most
        self._refused = 0  # how often the first has been offered in vain
        self.dropped = 0

    def put(self, values: torch.Tensor, then: Then) -> None:
        """Queue a copy of `values` to the host; `then` gets it as a numpy array, in the order of the calls.

        When it answers False (it has no use for them yet), it is asked again at later polls, as often as `most`.
        """
        import torch

        if len(self._pending) >= self._most or capturing():
            self.dropped += 1
            return
        host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
        host.copy_(values.detach(), non_blocking=True)
        event = torch.Event(values.device)
        event.record()
        self.after(event, lambda: then(host.numpy()))

    def after(self, event: Any, then: Callable[[], object]) -> None:
        """Call `then` once `event` has passed; False as in `put`."""
        if len(self._pending) >= self._most:
            self.dropped += 1
            return
        self._pending.append((event, then))

    @property
    def waiting(self) -> bool:
        """Whether anything is still to come."""
        return bool(self._pending)

    def poll(self) -> None:
        """Hand over what has arrived."""
        if self._pending and capturing():
            return
        while self._pending and self._pending[0][0].query():
            if self._pending[0][1]() is False:
                self._refused += 1
                if self._refused < self._most:
                    return
                self.dropped += 1  # nobody will want it any more, and the others wait behind it
            self._refused = 0
            self._pending.popleft()

    def clear(self) -> None:
        """Forget what is pending."""
        self._pending.clear()
