"""Says a line where the training says its own: on the standard error of its ranks, or of who started them.

The monitor has no terminal. It borrows the descriptor of a living rank for one write, so that a log file keeps its
order, and never waits: a reader that does not read costs it a thread.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from threading import Thread

from dtobs.findings import CATALOGUE, Finding, Severity, Trait
from dtobs.monitor.exits import Watched
from dtobs.words import duration_text

VARIABLE = "DTOBS_CONSOLE"
"""0 keeps the console free of our lines."""
_PIDFD_GETFD = 438
_STDERR = 2
_MAX_LINES = 8
_PATIENCE_SECONDS = 1.0


class Console:
    """The console of one run. Every matter is told once, and of many only the first."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._told: set[str] = set()
        self._lines = 0

    def found(self, finding: Finding, watched: Iterable[Watched]) -> None:
        """Tell of a finding, when it is critical, and not brought about by how a hang ends that was told of before.

        A rank that stood still may call something else while it is being ended: Lightning broadcasts on SIGTERM.
        """
        if Trait.AFTERMATH in finding.traits and self._told:
            return
        stood = any(Trait.RECOVERABLE in CATALOGUE[code].traits for code in self._told - {"network-stalled"})
        if Trait.DISAGREEMENT in finding.traits and stood:
            return
        if finding.severity is Severity.CRITICAL and finding.code not in self._told:
            self._told.add(finding.code)
            self._say(f"{finding.code}: {finding.summary}; more with: dtobs diagnose {self._root}", watched)

    def cleared(
        self, finding: Finding, lost_seconds: float, watched: Iterable[Watched], *, run_ended: bool = False
    ) -> None:
        """Tell that what was told of is over, and whether the run goes on."""
        if finding.code in self._told:
            self._told.remove(finding.code)
            then = "the run has ended since" if run_ended else "the run goes on"
            self._say(f"{finding.code} is over after {duration_text(lost_seconds)}: {then}", watched)

    def _say(self, text: str, watched: Iterable[Watched]) -> None:
        self._lines += 1
        if self._lines > _MAX_LINES or os.environ.get(VARIABLE) == "0":
            return
        data = f"dtobs: {' '.join(text.split())}\n".encode()
        found = list(watched)
        for pid in dict.fromkeys((*(w.pid for w in found), *(w.parent for w in found))):
            fd = _stderr_of(pid) if pid > 1 else None
            if fd is not None:
                writer = Thread(target=_write, args=(fd, data), daemon=True)
                writer.start()
                writer.join(_PATIENCE_SECONDS)
                return


def _stderr_of(pid: int) -> int | None:
    """The standard error of a process as our own descriptor; None where there is none to be had."""
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        fd = int(ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, _STDERR, 0))
    finally:
        os.close(process)
    return fd if fd >= 0 else _opened(pid)


def _opened(pid: int) -> int | None:
    """Where the kernel does not lend it: a terminal or a pipe can be opened; a file would be written over."""
    try:
        fd = os.open(f"/proc/{pid}/fd/{_STDERR}", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        return None
    return fd


def _write(fd: int, data: bytes) -> None:
    try:
        os.write(fd, data)
    except OSError:
        pass  # nobody reads it any more
    finally:
        os.close(fd)
