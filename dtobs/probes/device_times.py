"""When computations ran on a device, on the host's clock, without waiting for the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from dtobs.probes.deferred import Deferred

MAX_PENDING = 4096


def stream_marks(device: torch.device) -> Callable[[], Any]:
    """What makes events on the current stream of `device`."""

    def mark() -> torch.Event:
        event = torch.Event(device, enable_timing=True)
        event.record()
        return event

    return mark


class DeviceTimes(Deferred):
    """Marks on the current stream; `poll` hands over the times of those that have passed, in order.

    An anchor ties the device's clock to the host's: an event whose host time is taken when it is recorded. What the
    stream had queued by then makes all times of that anchor early by that much, the same on each of its marks.
    """

    def __init__(self, mark: Callable[[], Any]) -> None:
        super().__init__(MAX_PENDING)
        self.mark = mark  #: makes an event and records it on the current stream
        self._anchor: tuple[Any, int] | None = None

    def anchor(self) -> None:
        """Tie the clocks here: best where the device has little queued."""
        self._anchor = (self.mark(), time.monotonic_ns())

    def span(self, begin: Any, then: Callable[[int, int], None]) -> None:
        """What began at the mark `begin` ends here; `then(begin_ns, end_ns)` is called from a later `poll`."""
        if self._anchor is None or begin is None:
            self.dropped += 1
            return
        (event, host_ns), end = self._anchor, self.mark()

        def passed() -> None:
            then(*(host_ns + round(event.elapsed_time(mark) * 1e6) for mark in (begin, end)))

        self.after(end, passed)
