"""Whether the kernel killed a process for its memory: control-group counters, and the kernel log where readable."""

from __future__ import annotations

from pathlib import Path

from dtobs.host.kernel_log import KERNEL_LOG, log_records
from dtobs.host.process import kernel_text


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
        if any(f"Killed process {pid} (" in record for record in log_records(self._log)):
            return True
        path = self._group_of.get(pid)
        if path is None or _oom_kills(path) <= self._seen[path]:
            return False
        self._seen[path] += 1
        return True

    def _counter(self, pid: int) -> Path | None:
        for line in kernel_text(self._proc / str(pid) / "cgroup").splitlines():
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


def _oom_kills(path: Path) -> int:
    """The counter ``oom_kill`` of a memory control group, -1 when it has none."""
    fields = dict(line.split(" ", 1) for line in kernel_text(path).splitlines() if " " in line)
    kills = fields.get("oom_kill", "")
    return int(kills) if kills.isdecimal() else -1
