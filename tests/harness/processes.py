"""Processes seen through /proc: alive or not, in which state, and which ones a test run started.

Everything a test starts carries a token in its environment (`TOKEN_VARIABLE`), which children inherit through
`exec` whatever session or process group they move to. That finds a monitor that outlives its ranks, by id,
without ever matching a name.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

TOKEN_VARIABLE = "DTOBS_TEST_TOKEN"
_POLL_SECONDS = 0.02


def is_alive(pid: int) -> bool:
    """True while `pid` exists and is not a zombie."""
    return state(pid) not in ("", "Z", "X")


def state(pid: int) -> str:
    """The one-letter state of /proc/PID/stat ("R", "S", "D", "T", "Z"), empty when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return text.rpartition(")")[2].split()[0]


def command_line(pid: int) -> list[str]:
    """The words a process was started with, those of its parent between fork and exec; [] when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def processes_with_token(token: str) -> list[int]:
    """Ids of the living processes started (by exec) with this token in their environment, this one excluded."""
    wanted = f"{TOKEN_VARIABLE}={token}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # another user's, or gone between the listing and the read
            continue
        if wanted in variables and is_alive(int(entry.name)):
            found.append(int(entry.name))
    return sorted(found)


def send_signal(pid: int, number: int) -> bool:
    """Sends a signal; False when the process is already gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def kill_all(pids: Iterable[int]) -> None:
    """SIGKILL to each, by id."""
    for pid in pids:
        send_signal(pid, signal.SIGKILL)


def kill_token(token: str, *, rounds: int = 5) -> None:
    """Kills what carries the token, again while it still finds something (a process may have been forking)."""
    for _ in range(rounds):
        pids = processes_with_token(token)
        if not pids:
            return
        kill_all(pids)
        wait_until_gone(pids, timeout=5)


def wait_until_gone(pids: Iterable[int], timeout: float) -> list[int]:
    """Waits until no process of `pids` is alive; returns those that still are after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    left = [pid for pid in pids if is_alive(pid)]
    while left and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        left = [pid for pid in left if is_alive(pid)]
    return left
