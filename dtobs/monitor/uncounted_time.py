"""Time in which nothing could move, whoever is to blame: it does not count towards a stall.

Three things look like a hang and are none: somebody suspended ranks and continued them; the whole machine stood still
(a paused container or virtual machine, and this monitor with it); ranks that want to run and get no processor, because
the machine is overloaded. While a rank *is* suspended its time counts, as that is a finding of its own; once it runs
again it does not. Wall clocks play no part, and the monotonic clock stands still while a machine sleeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from dtobs.host.process import ProcessState, waited_for_core_ns
from dtobs.recording.uncounted_time import Excused

LATE_NS = 2_000_000_000
"""This monitor woke that much later than it meant to: it was not running, and then nobody may have been."""
STARVED_SHARE = 0.5
"""A rank with a thread that waited for a processor for more than this share of a moment was kept from moving in it.

Of one thread, not of all together: those of a device's driver and of NCCL poll, each gets a core most of the time, and
on a busy machine their waits add up to more than the time there is.
"""
_LONG_AGO_NS = 15_000_000_000

Delay = Callable[[int], Mapping[int, int]]
"""How long each thread of a process has waited for a processor so far, ns; empty where the kernel does not say."""


class Excuses:
    """Fed by the monitor's loop. All times are monotonic, ns."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns, delay: Delay = waited_for_core_ns) -> None:
        self._clock, self._delay = clock, delay
        self._spans: list[Excused] = []
        self._due_ns: int | None = None
        self._stopped_ns: int | None = None  # since when a rank has been suspended
        self._seen_ns = 0
        self._delays: dict[int, int] = {}  # by thread, at the last observation

    def awake(self) -> None:
        """The monitor's loop makes a turn."""
        now = self._clock()
        if self._due_ns is not None and now - self._due_ns > LATE_NS:
            self._spans.append(Excused(self._due_ns, now))
        self._due_ns = None

    def asleep(self, seconds: float) -> None:
        """The loop is going to wait that long at most."""
        self._due_ns = self._clock() + round(seconds * 1e9)

    def observe(self, processes: Mapping[int, ProcessState], since_ns: int) -> tuple[Excused, ...]:
        """Look at the ranks of this node; the time after `since_ns` that does not count."""
        now, before = self._clock(), self._seen_ns
        self._seen_ns = now
        self._suspension(any(p.stopped for p in processes.values()), before or now, now)
        share = self._starvation([p.pid for p in processes.values() if p.alive and not p.stopped], now - before)
        if share > STARVED_SHARE:
            self._add(Excused(before, now, share))
        self._spans = [span for span in self._spans if span.end_ns > since_ns]
        return tuple(self._spans)

    def _add(self, span: Excused) -> None:
        """One more; looks that follow each other become one span, so that there are never many."""
        last = self._spans[-1] if self._spans else None
        if last is not None and last.end_ns == span.begin_ns:
            whole = span.end_ns - last.begin_ns
            time_ns = last.within_ns(0, span.end_ns) + span.within_ns(0, span.end_ns)
            self._spans[-1] = Excused(last.begin_ns, span.end_ns, time_ns / whole)
        else:
            self._spans.append(span)

    def _suspension(self, stopped: bool, before: int, now: int) -> None:
        if stopped and self._stopped_ns is None:
            self._stopped_ns = before  # it happened since the last look
        elif not stopped and self._stopped_ns is not None:
            self._spans.append(Excused(self._stopped_ns, now))
            self._stopped_ns = None

    def _starvation(self, pids: list[int], elapsed_ns: int) -> float:
        """The share of the time that the thread which waited most for a processor did so; 0 when it is not known."""
        delays = {thread: delay for pid in pids for thread, delay in self._delay(pid).items()}
        gained = [delay - self._delays[thread] for thread, delay in delays.items() if thread in self._delays]
        self._delays = delays
        if not gained or not 0 < elapsed_ns < _LONG_AGO_NS:
            return 0.0
        return min(1.0, max(gained) / elapsed_ns)
