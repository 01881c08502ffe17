"""What the kernel says of a process: alive or not, state, where it waits, how it ended."""

from __future__ import annotations

import os
import signal as signals
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ProcessState:
    """One process at one moment. `state` is the letter of /proc (R S D T t Z), "" when the process is gone.

    `exit_code` follows subprocess: negative is the signal that ended it; None when it lives or nobody saw it end.
    """

    pid: int
    alive: bool
    state: str = ""
    wchan: str = ""
    cpu_seconds: float = 0.0
    rss_bytes: int = 0
    exit_code: int | None = None
    oom_killed: bool = False
    ended_ns: int = 0  #: monotonic time at which a monitor saw it end; 0 when nobody did
    alive_ns: int = 0  #: of a process that has ended: when that monitor had seen it alive for the last time

    def shifted(self, by_ns: int) -> ProcessState:
        """The same by a clock that shows `by_ns` more."""
        ended = self.ended_ns + by_ns if self.ended_ns else 0
        return replace(self, ended_ns=ended, alive_ns=self.alive_ns + by_ns if self.alive_ns else 0)

    @property
    def stopped(self) -> bool:
        """Suspended by a signal or a debugger."""
        return self.state in ("T", "t")

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        if self.alive:
            return "alive"
        if self.oom_killed:
            return "killed by the kernel: out of memory"
        if self.exit_code is None:
            return "gone, exit code unknown"
        if self.exit_code < 0:
            return f"killed by {signal_name(-self.exit_code)}"
        return f"exited with code {self.exit_code}"


def signal_name(number: int) -> str:
    """SIGKILL for 9; "signal 77" for one without a name."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


def decode_status(status: int) -> int:
    """A wait status as an exit code, negative for a signal."""
    return -(status & 0x7F) if status & 0x7F else (status >> 8) & 0xFF


def read_process(pid: int, start_ticks: int = 0, proc: Path = Path("/proc")) -> ProcessState:
    """The present state of `pid`; with `start_ticks`, a later process with the same number counts as gone."""
    fields = stat_fields(pid, proc)
    if not fields or (start_ticks and int(fields[19]) != start_ticks):
        return ProcessState(pid, alive=False)
    state = fields[0]
    if state in ("Z", "X"):
        # Visible until its parent has waited for it; the last field is the wait status.
        return ProcessState(pid, alive=False, state=state, exit_code=decode_status(int(fields[49])))
    return ProcessState(
        pid,
        alive=True,
        state=state,
        wchan=kernel_text(f"{proc}/{pid}/wchan").strip("\0\n "),
        cpu_seconds=(int(fields[11]) + int(fields[12])) / _TICKS,
        rss_bytes=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
    )


def cores_used(
    before: Mapping[int, ProcessState], after: Mapping[int, ProcessState], seconds: float
) -> dict[int, float]:
    """Of processes by rank, looked at twice: how many cores those that lived on used in between, on average."""
    return {
        rank: (now.cpu_seconds - then.cpu_seconds) / seconds
        for rank, then in before.items()
        if (now := after.get(rank)) is not None and (then.alive, now.alive, now.pid) == (True, True, then.pid)
    }


def start_ticks(pid: int, proc: Path = Path("/proc")) -> int:
    """When the process began, in clock ticks since boot; 0 when it is gone."""
    fields = stat_fields(pid, proc)
    return int(fields[19]) if fields else 0


def parent_of(pid: int, proc: Path = Path("/proc")) -> int:
    """The parent's id; 0 when the process is gone."""
    fields = stat_fields(pid, proc, 2)
    return int(fields[1]) if fields else 0


def environment_of(pid: int, proc: Path = Path("/proc")) -> dict[str, str]:
    """The variables that a process was started with; {} when it is gone or may not be read."""
    text = kernel_text(f"{proc}/{pid}/environ", 1 << 20)
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def waited_for_core_ns(pid: int | str = "self", proc: Path = Path("/proc")) -> dict[int, int]:
    """Nanoseconds that each living thread of a process could have run and got no core; empty where it is not known.

    ``schedstat`` of a thread has the time on a core, the time that it waited for one, and its slices.
    """
    waits: dict[int, int] = {}
    with suppress(OSError):
        for thread in (proc / str(pid) / "task").iterdir():
            fields = kernel_text(thread / "schedstat").split()
            if len(fields) == 3:  # of a thread that has just ended nothing is known
                waits[int(thread.name)] = int(fields[1])
    return waits


def process_ids(proc: Path = Path("/proc")) -> list[int]:
    """The ids of all processes, ascending."""
    try:
        return sorted(int(entry.name) for entry in proc.iterdir() if entry.name.isdigit())
    except OSError:
        return []


def stat_fields(pid: int, proc: Path = Path("/proc"), least: int = 50) -> list[str]:
    """Fields of /proc/PID/stat from the third (state) on, [] where there are not so many.

    The name before them may hold anything. The process's own and its reaped children's times are 11 to 14.
    """
    fields = kernel_text(f"{proc}/{pid}/stat").rpartition(")")[2].split()
    return fields if len(fields) >= least else []


def kernel_text(path: Path | str, most: int = 1 << 16) -> str:
    """A file of the kernel's that one read brings, at most so many bytes; "" where it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, most).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(fd)


def with_path(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Variables for a Python process that looks for modules in `folder` first."""
    paths = [str(folder), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    return {**environment, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


@lru_cache
def boot_id(proc: Path = Path("/proc")) -> str:
    """The kernel's identifier of this boot of this host; "" where there is none."""
    return kernel_text(proc / "sys/kernel/random/boot_id").strip()


@lru_cache
def pid_namespace(proc: Path = Path("/proc")) -> str:
    """The kernel's name of the namespace that our process ids are of; "" where there is none."""
    try:
        return str((proc / "self/ns/pid").readlink())
    except OSError:
        return ""
