"""Python stacks of a rank from outside: by the signal that its faulthandler answers, else by py-spy.

A signal that nobody handles would end the rank, so it is sent only when /proc says that it is caught, and through a
pidfd, so that it cannot reach another process.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from dtobs.host import pyspy
from dtobs.host.process import kernel_text, start_ticks
from dtobs.host.pyspy import NoStacks
from dtobs.host.stacks import parse_stacks
from dtobs.words import duration_text

__all__ = ["MAX_BYTES", "NoStacks", "by_pyspy", "by_signal", "catches"]

MAX_BYTES = 4 << 20
_POLL_SECONDS = 0.03
_STILL_POLLS = 4
"""For how many looks in a row the file must not have grown: a rank on a busy host may be interrupted between lines."""


def by_signal(pid: int, ticks: int, number: int, file: Path, seconds: float) -> str:
    """Send the signal and return what the rank appended to `file`. Raises NoStacks."""
    if number <= 0:
        raise NoStacks(f"process {pid} has not said which signal prints its stacks")
    try:
        fd = os.pidfd_open(pid)
    except OSError as error:
        raise NoStacks(f"process {pid} is gone") from error
    try:
        if ticks and start_ticks(pid) != ticks:
            raise NoStacks(f"process {pid} is another one now")
        if not catches(pid, number):
            raise NoStacks(f"process {pid} does not handle signal {number} (recording closed?)")
        before = _size(file)
        signal.pidfd_send_signal(fd, number)
    except OSError as error:
        raise NoStacks(f"cannot signal process {pid}: {error.strerror}") from error
    finally:
        os.close(fd)
    deadline = time.monotonic() + seconds
    size, still = before, 0
    while time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        now = _size(file)
        still = still + 1 if now == size else 0
        size = now
        if now > before and still >= _STILL_POLLS and _is_whole(said := _tail(file, before)):
            return said
    if size > before:
        return _tail(file, before)
    raise NoStacks(f"no stacks in {file.name} after {duration_text(seconds)}")


def by_pyspy(pid: int, seconds: float = 4.0) -> str:
    """What py-spy sees without stopping the process. Raises NoStacks, also when it is absent or not permitted."""
    return pyspy.dump(pid, "--full-filenames", seconds=seconds).decode(errors="replace")


def catches(pid: int, number: int, proc: Path = Path("/proc")) -> bool:
    """Whether the process has a handler for the signal."""
    for line in kernel_text(proc / str(pid) / "status").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _is_whole(said: str) -> bool:
    """Whether a dump may end here: faulthandler writes it piece by piece, and nothing after the last line."""
    return said.endswith("\n") and bool(parse_stacks(said))


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _tail(file: Path, offset: int) -> str:
    try:
        with file.open("rb") as stream:
            stream.seek(offset)
            return stream.read(MAX_BYTES).decode(errors="replace")
    except OSError as error:
        raise NoStacks(f"cannot read {file.name}: {error.strerror}") from error
