"""At which of the user's lines a rank spends its time: what the monitor asks for, and what a rank answers.

``lines.json`` in the run directory says whom the monitor asks. A rank that finds itself in it looks at the stack of the
thread that trains, `LOOKS` times over a few steps, and enters in its meta file (``lines``) how often each line of code
that is neither torch's nor Python's own was on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dtobs.codec import DecodeError, decode
from dtobs.errors import TargetError
from dtobs.recording.rundir import RunDirectory, read_json, write_json

LOOKS = 48
LEAST_SECONDS, MOST_SECONDS = 3.0, 60.0
MOST_LINES = 48


@dataclass(frozen=True)
class LinesRequest:
    """Look at the stacks of `ranks` for about `seconds`; `number` tells it from the requests before."""

    number: int
    ranks: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Line:
    """A line of code: on the stack in `within` looks, the innermost in `at` of them; `depth` is 0 for the outermost.

    `data` of those `at` it were looks at a rank that waited for its data.
    """

    where: str
    within: int
    at: int
    depth: float
    data: int = 0


@dataclass(frozen=True)
class Lines:
    """What `looks` at a rank's stack have shown; the request's `number`, and the step in which the first was."""

    number: int
    step: int
    looks: int
    lines: tuple[Line, ...]

    def share(self, where: str) -> float:
        """In what share of the looks that line was on the stack."""
        return next((line.within for line in self.lines if line.where == where), 0) / max(self.looks, 1)


class StackLook(NamedTuple):
    """What one look saw: lines, the innermost first, and whether the rank waited for its data."""

    stack: Sequence[str]
    data: bool = False


def counted(request: LinesRequest, step: int, looks: Sequence[StackLook]) -> Lines:
    """The lines that were seen most."""
    within, at, depth, data = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for stack, waits in looks:
        at.update(stack[:1])
        data.update(stack[:1] if waits else ())
        within.update(set(stack))
        deepest = {where: len(stack) - place - 1 for place, where in reversed(list(enumerate(stack)))}
        depth.update(deepest)
    most = sorted(within.items(), key=lambda item: (-item[1], item[0]))[:MOST_LINES]
    kept = (Line(where, seen, at[where], round(depth[where] / seen, 2), data[where]) for where, seen in most)
    return Lines(request.number, step, len(looks), tuple(kept))


def lines_path(run: RunDirectory) -> Path:
    """The file that a request is written to; the newest counts."""
    return run.root / "lines.json"


def ask_for_lines(run: RunDirectory, number: int, ranks: Iterable[int], seconds: float) -> None:
    """Write a request. Raises RecordingDisabled."""
    seconds = min(max(seconds, LEAST_SECONDS), MOST_SECONDS)
    write_json(lines_path(run), vars(LinesRequest(number, tuple(ranks), seconds)))


def read_lines_request(run: RunDirectory) -> LinesRequest | None:
    """The newest request; None where there is none, or a file that is not one."""
    try:
        request = decode(LinesRequest, read_json(lines_path(run)))
    except (TargetError, DecodeError):
        return None
    return request if 0 < request.seconds <= MOST_SECONDS else None
