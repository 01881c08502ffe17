"""What keeps a training thread from its work: no core, processor time used up, garbage collection."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt


class _KernelFile:
    """The first of `paths` that can be opened, kept open to be read again and again; none where none can."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._fd = -1
        for path in paths:
            try:
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                break
            except OSError:
                continue

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class Schedule(_KernelFile):
    """Of the thread that makes it, from ``/proc/thread-self/schedstat`` (Linux, Documentation/scheduler/sched-stats):
    nanoseconds on a core, nanoseconds waiting for one, time slices. 0 for ever where the kernel does not say.
    """

    def __init__(self, path: Path = Path("/proc/thread-self/schedstat")) -> None:
        super().__init__([path])

    def read_ns(self) -> tuple[int, int]:
        """Nanoseconds on a core and waited for one since the thread began."""
        if self._fd < 0:
            return 0, 0
        try:
            on_core, delay = os.pread(self._fd, 96, 0).split()[:2]
            return int(on_core), int(delay)
        except (OSError, ValueError):
            self.close()
            return 0, 0


class Throttled(_KernelFile):
    """How long this process's control group was kept from running because its quota was used up: ``cpu.stat``.

    Read at most once in `EVERY_SECONDS`; 0 for ever where there is no quota. `root` and `clock` are for tests.
    """

    EVERY_SECONDS = 0.5

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(_cpu_stats(root))
        self._clock, self._next = clock, clock()
        self._last = self._read()

    def read_ns(self) -> int:
        """Nanoseconds throttled since the last call that looked; 0 between the looks."""
        now = self._clock()
        if self._fd < 0 or now < self._next:
            return 0
        self._next = now + self.EVERY_SECONDS
        before, self._last = self._last, self._read()
        return max(0, self._last - before)

    def _read(self) -> int:
        if self._fd < 0:
            return 0
        try:
            fields = dict(line.split(maxsplit=1) for line in os.pread(self._fd, 4096, 0).decode().splitlines())
            return int(fields["throttled_usec"]) * 1000 if "throttled_usec" in fields else int(fields["throttled_time"])
        except (OSError, ValueError, KeyError):
            self.close()
            return 0


def _cpu_stats(root: Path) -> list[Path]:
    """Where the kernel may tell of the throttling of this process: control groups version 2, then 1."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            found.append(root / "sys/fs/cgroup" / path.lstrip("/") / "cpu.stat")
        elif "cpu" in controllers.split(","):
            found += [root / "sys/fs/cgroup" / c / path.lstrip("/") / "cpu.stat" for c in (controllers, "cpu")]
    return [*found, root / "sys/fs/cgroup/cpu.stat"]


class Collections:
    """How long Python collected garbage on the thread that calls `start`."""

    def __init__(self) -> None:
        self._thread, self._begin, self.total_ns = 0, 0, 0

    def start(self) -> None:
        """Listen from now on."""
        self._thread = threading.get_ident()
        if self._seen not in gc.callbacks:
            gc.callbacks.append(self._seen)

    def close(self) -> None:
        """Listen no more."""
        if self._seen in gc.callbacks:
            gc.callbacks.remove(self._seen)

    def _seen(self, phase: str, _info: dict[str, int]) -> None:
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._begin = time.perf_counter_ns()
        elif self._begin:
            self.total_ns += time.perf_counter_ns() - self._begin
            self._begin = 0


class Hindrances:
    """Time on a core, run delay, throttling and garbage collection of the thread that creates this object.

    `fill` writes what has accumulated since the last call of `begin` or `fill`.
    """

    def __init__(self) -> None:
        self._schedule, self._throttled, self._collections = Schedule(), Throttled(), Collections()
        self._on_core_ns = self._delay_ns = self._gc_ns = 0

    def begin(self) -> None:
        """Start counting: the first step begins."""
        self._on_core_ns, self._delay_ns = self._schedule.read_ns()
        self._gc_ns = self._collections.total_ns
        self._collections.start()

    def fill(self, record: npt.NDArray[np.void]) -> None:
        """A step ends: fill in its fields."""
        (on_core, delay), collected = self._schedule.read_ns(), self._collections.total_ns
        record["on_core_ns"], self._on_core_ns = max(0, on_core - self._on_core_ns), on_core
        record["run_delay_ns"], self._delay_ns = max(0, delay - self._delay_ns), delay
        record["gc_ns"], self._gc_ns = collected - self._gc_ns, collected
        record["throttled_ns"] = self._throttled.read_ns()

    def close(self) -> None:
        """Let go of files and of the collector."""
        self._schedule.close()
        self._throttled.close()
        self._collections.close()
