"""How long a thread that could have run waited for a core: what an overloaded machine does to a rank."""

from __future__ import annotations

import os
from pathlib import Path


class RunDelay:
    """Of the thread that makes it, from ``/proc/thread-self/schedstat`` (Linux, Documentation/scheduler/sched-stats):
    nanoseconds on a core, nanoseconds waiting for one, time slices. 0 for ever where the kernel does not say.
    """

    def __init__(self, path: Path = Path("/proc/thread-self/schedstat")) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1

    def read_ns(self) -> int:
        """Nanoseconds waited for a core since the thread began."""
        if self._fd < 0:
            return 0
        try:
            return int(os.pread(self._fd, 96, 0).split()[1])
        except (OSError, ValueError, IndexError):
            self.close()
            return 0

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
