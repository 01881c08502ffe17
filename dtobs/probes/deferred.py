"""Values that a device still computes, handed over without waiting for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy.typing as npt
import torch

MAX_PENDING = 64
Then = Callable[[npt.NDArray[Any]], bool]


class Deferred:
    """Copies small device tensors to the host and calls back once they have arrived: a step or so later.

    Nothing here synchronises: the copy is queued behind the computation, and `poll` only asks. Values that pile up
    beyond `MAX_PENDING` are dropped and counted.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[torch.Event, torch.Tensor, Then]] = deque()
        self.dropped = 0

    def put(self, values: torch.Tensor, then: Then) -> None:
        """Queue the copy of `values`; `then` gets them as a numpy array, in the order of the calls.

        When it answers False (it has no use for them yet), it is asked again at a later poll.
        """
        if len(self._pending) >= MAX_PENDING:
            self.dropped += 1
            return
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        event = torch.Event(values.device)
        event.record()
        self._pending.append((event, host, then))

    def poll(self) -> None:
        """Hand over what has arrived."""
        while self._pending and self._pending[0][0].query():
            if not self._pending[0][2](self._pending[0][1].numpy()):
                return
            self._pending.popleft()

    def clear(self) -> None:
        """Forget what is pending."""
        self._pending.clear()
