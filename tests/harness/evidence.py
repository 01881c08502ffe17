"""What a failed test gets to read: tracebacks, the end of the output, the stacks of ranks that hang."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tests.harness import processes

_TAIL_LINES = 30


class Ended(Protocol):
    """The part of a `RankResult` that is shown."""

    @property
    def rank(self) -> int: ...
    @property
    def exitcode(self) -> int | None: ...
    @property
    def exception(self) -> str | None: ...
    @property
    def stderr(self) -> Path: ...


def describe_failures(results: Sequence[Ended], world_size: int, stacks: str) -> str:
    """One block a rank that failed, then the stacks of the ranks that were still waiting."""
    blocks = [f"{len(results)} of {world_size} ranks did not end as expected"]
    for result in results:
        body = result.exception or tail(result.stderr) or "(no output on stderr)"
        blocks.append(f"--- rank {result.rank} ended with {ending(result.exitcode)}\n{body.rstrip()}")
    if stacks:
        blocks.append(f"the other ranks were then still at work:\n{stacks}")
    return "\n".join(blocks)


def describe_hang(ranks: Sequence[tuple[int, int, Path]], signal_number: int, timeout: float) -> str:
    """Asks each (rank, pid, folder) for its Python stacks by signal and collects them for `timeout` seconds."""
    before = {rank: _size(folder / "stacks.txt") for rank, _, folder in ranks}
    for _, pid, _ in ranks:
        processes.send_signal(pid, signal_number)
    deadline = time.monotonic() + timeout
    waiting = [(rank, folder) for rank, pid, folder in ranks if processes.state(pid) not in ("T", "Z", "")]
    while waiting and time.monotonic() < deadline:
        time.sleep(0.05)  # longer than the dump takes, so that it is read whole
        waiting = [(r, f) for r, f in waiting if _size(f / "stacks.txt") == before[r]]
    return "\n".join(_one_rank(rank, pid, folder) for rank, pid, folder in ranks)


def ending(exitcode: int | None) -> str:
    """ "exit code 1", "signal SIGKILL", or "no exit code" for a rank still alive."""
    if exitcode is None:
        return "no exit code (still alive)"
    if exitcode < 0:
        return f"signal {signal.Signals(-exitcode).name}"
    return f"exit code {exitcode}"


def tail(path: Path, lines: int = _TAIL_LINES) -> str:
    """The last lines of a file; empty when it does not exist."""
    if not path.exists():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def _one_rank(rank: int, pid: int, folder: Path) -> str:
    stacks = tail(folder / "stacks.txt", 200) or "(no stacks: the process does not handle signals)"
    head = f"--- rank {rank} (process {pid}, state {processes.state(pid) or 'gone'})"
    errors = tail(folder / "stderr.log")
    return "\n".join([head, stacks, *(["its stderr ends with:", errors] if errors else [])])


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
