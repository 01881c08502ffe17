"""Whether the kernel killed a process for its memory: control-group counters, and the kernel log where readable."""

from __future__ import annotations

import os
from pathlib import Path

KERNEL_LOG = Path("/dev/kmsg")
_LOG_RECORD = 8192
_LOG_RECORDS = 4096


class OomWatch:
    """Counts of ``oom_kill`` per control group, remembered since each was first looked at.

    `proc` and `cgroups` are the roots of those file systems.
    """

    def __init__(
        self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup"), log: Path = KERNEL_LOG
    ) -> None:
        self._proc, self._cgroups, self._log = proc, cgroups, log
        self._group_of: dict[int, Path] = {}
        self._seen: dict[Path, int] = {}

    def follow(self, pid: int) -> None:
        """Remember the group of a living process and its count now."""
        path = self._counter(pid)
        if path is not None:
            self._group_of[pid] = path
            self._seen.setdefault(path, _oom_kills(path))

    def killed(self, pid: int) -> bool:
        """Whether `pid`, which SIGKILL ended, was killed for memory; each kill counted explains one process."""
        if self._in_kernel_log(pid):
            return True
        path = self._group_of.get(pid)
        if path is None or _oom_kills(path) <= self._seen[path]:
            return False
        self._seen[path] += 1
        return True

    def _counter(self, pid: int) -> Path | None:
        try:
            lines = (self._proc / str(pid) / "cgroup").read_text().splitlines()
        except OSError:
            return None
        for line in lines:
            _, controllers, group = line.split(":", 2)
            inner = group.lstrip("/")
            if controllers == "":
                candidates = [self._cgroups / inner / "memory.events"]
            elif "memory" in controllers.split(","):
                # Inside a container the group's own mount is the root of what is visible.
                base = self._cgroups / "memory"
                candidates = [base / inner / "memory.oom_control", base / "memory.oom_control"]
            else:
                continue
            for candidate in candidates:
                if candidate.is_file() and _oom_kills(candidate) >= 0:
                    return candidate
        return None

    def _in_kernel_log(self, pid: int) -> bool:
        try:
            fd = os.open(self._log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False  # not permitted, as for most users
        wanted = f"Killed process {pid} (".encode()
        try:
            for _ in range(_LOG_RECORDS):
                record = os.read(fd, _LOG_RECORD)
                if not record:
                    return False
                if wanted in record:
                    return True
        except OSError:  # EAGAIN: the end of the log; EPIPE: overwritten while we read
            return False
        finally:
            os.close(fd)
        return False


def _oom_kills(path: Path) -> int:
    """The counter ``oom_kill`` of a memory control group, -1 when it has none."""
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        return -1
    return -1
