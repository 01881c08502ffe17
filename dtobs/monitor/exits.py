"""The ranks' processes: known to have ended at the instant they do, with their exit status even when reaped at once."""

from __future__ import annotations

import fcntl
import json
import os
import select
import struct
import time
from dataclasses import dataclass, replace
from pathlib import Path

from dtobs.host.process import ProcessState, decode_status, environment_of, parent_of, read_process, start_ticks
from dtobs.monitor.oom import OomWatch

_GET_INFO = (3 << 30) | (64 << 16) | (0xFF << 8) | 11  # PIDFD_GET_INFO, Linux 6.13; exit status since 6.15
_INFO_EXIT = 1 << 3
_INFO_BYTES = 64
_EXIT_OFFSET = 60


@dataclass(frozen=True)
class Watched:
    """A process of one rank in one attempt.

    `parent` is who started it, with its start ticks; `restartable` says that it is torchrun's agent with restarts left.
    """

    rank: int
    attempt: int
    pid: int
    start_ticks: int
    parent: int = 0
    parent_ticks: int = 0
    restartable: bool = False


class ProcessWatch:
    """Follows processes by pidfd; nothing polls. `proc` is the root of /proc for reading details."""

    def __init__(self, exits_path: Path, oom: OomWatch | None = None) -> None:
        self.exits_path = exits_path
        self.ended: dict[int, ProcessState] = {}  #: by pid
        self.unwritten: list[str] = []  #: lines a full disk refused so far
        self._oom = oom or OomWatch()
        self._fds: dict[int, Watched] = {}
        self._known: dict[tuple[int, int], Watched] = {}
        self._poll = select.poll()
        self._looked_ns = 0  # when all that had not ended by then were alive

    def also(self, fd: int) -> None:
        """Let `wait` return when `fd` becomes readable."""
        self._poll.register(fd, select.POLLIN)

    def follow(self, rank: int, attempt: int, pid: int, ticks: int) -> Watched:
        """Watch a rank's process from now on; a second call for the same process changes nothing."""
        key = (pid, ticks)
        if key in self._known and self._known[key].attempt == attempt:
            return self._known[key]
        parent = parent_of(pid)
        watched = Watched(rank, attempt, pid, ticks, parent, start_ticks(parent) if parent else 0, restartable(pid))
        if key in self._known:  # the same process attached again
            self._known[key] = watched
            self._fds = {fd: watched if (w.pid, w.start_ticks) == key else w for fd, w in self._fds.items()}
            return watched
        self._known[key] = watched
        try:
            fd = os.pidfd_open(pid)
        except OSError:  # ended before we came: how, nobody can say any more
            self.ended[pid] = ProcessState(pid, alive=False)
            return watched
        now = read_process(pid, ticks)
        if not now.alive and now.exit_code is None:  # another process has this number today
            os.close(fd)
            self.ended[pid] = now
            return watched
        self.ended.pop(pid, None)
        self._oom.follow(pid)
        self._fds[fd] = watched
        self._poll.register(fd, select.POLLIN)
        return watched

    def wait(self, seconds: float) -> list[tuple[Watched, ProcessState]]:
        """Sleep until a process ends, another registered descriptor is readable, or time is up; who has ended."""
        found: list[tuple[Watched, ProcessState]] = []
        ready = self._poll.poll(max(0.0, seconds) * 1000)
        before_ns, self._looked_ns = self._looked_ns, time.monotonic_ns()
        for fd, _ in ready:
            watched = self._fds.pop(fd, None)
            if watched is None:
                continue
            self._poll.unregister(fd)
            state = replace(self._ending(fd, watched), ended_ns=time.monotonic_ns(), alive_ns=before_ns)
            os.close(fd)
            self.ended[watched.pid] = state
            found.append((watched, state))
            self._record(watched, state)
        return found

    def states(self, watched: list[Watched]) -> dict[int, ProcessState]:
        """The state of each rank's process, by rank: of a living one from /proc, of an ended one as it ended."""
        return {w.rank: self.ended[w.pid] if w.pid in self.ended else self._now(w) for w in watched}

    def _now(self, watched: Watched) -> ProcessState:
        """The state of a process that has not been seen to end; that of one which just did, as `wait` will say it."""
        state = read_process(watched.pid, watched.start_ticks)
        if state.alive or state.exit_code is not None:
            return state
        return next((self._ending(fd, w) for fd, w in self._fds.items() if w is watched), state)

    def alive(self, watched: Watched) -> bool:
        """Whether the process has not ended as far as is known."""
        return watched.pid not in self.ended

    def gone(self) -> list[Watched]:
        """Every process followed so far, of all attempts, that is there no more."""
        known = self._known.values()
        return [w for w in known if not self.alive(w) and not read_process(w.pid, w.start_ticks).alive]

    def close(self) -> None:
        """Stop following."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def _ending(self, fd: int, watched: Watched) -> ProcessState:
        state = read_process(watched.pid, watched.start_ticks)
        if state.exit_code is None:  # its parent has waited for it already
            state = ProcessState(watched.pid, alive=False, exit_code=_exit_of(fd))
        if state.exit_code == -9 and self._oom.killed(watched.pid):
            state = replace(state, oom_killed=True)
        return replace(state, ended_ns=time.monotonic_ns())

    def _record(self, watched: Watched, state: ProcessState) -> None:
        line = {
            **vars(state),
            "rank": watched.rank,
            "attempt": watched.attempt,
            "start_ticks": watched.start_ticks,
            "t_ns": state.ended_ns,
        }
        self.unwritten.append(json.dumps(line, separators=(",", ":")) + "\n")
        self.flush()

    def flush(self) -> bool:
        """Write what is not yet in exits.jsonl; False when it cannot be written now."""
        return write_out(self.exits_path, self.unwritten)


def write_out(path: Path, lines: list[str]) -> bool:
    """Append lines that were kept and forget them; False, and they are still kept, when the disk refuses."""
    if lines and not append_lines(path, lines):
        return False
    lines.clear()
    return True


def append_lines(path: Path, lines: list[str]) -> bool:
    """Append whole lines in one write, mode 0600. False, with nothing half-written left behind, when it cannot."""
    data = "".join(lines).encode()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            before = os.fstat(fd).st_size
            written = os.write(fd, data)
            if written < len(data):
                os.ftruncate(fd, before)
                return False
        finally:
            os.close(fd)
    except OSError:
        return False
    return True


def restartable(pid: int) -> bool:
    """Whether torchrun would start the process again, as its environment has it."""
    variables = environment_of(pid)
    done, limit = (variables.get(f"TORCHELASTIC_{name}", "") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return done.isdecimal() and limit.isdecimal() and int(done) < int(limit)


def _exit_of(fd: int) -> int | None:
    """The exit code of a reaped process through its pidfd; None where the kernel is too old to say."""
    buffer = bytearray(struct.pack("<Q", _INFO_EXIT).ljust(_INFO_BYTES, b"\0"))
    try:
        fcntl.ioctl(fd, _GET_INFO, buffer)
    except OSError:
        return None
    (mask,) = struct.unpack_from("<Q", buffer)
    if not mask & _INFO_EXIT:
        return None
    return decode_status(struct.unpack_from("<i", buffer, _EXIT_OFFSET)[0])
