"""The sender's side of a bundle: what has been recorded on this node since the asker last asked."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dtobs.errors import RecordingError
from dtobs.nodes.bundle import RINGS, Part
from dtobs.recording.laws import LAWS
from dtobs.recording.page import PAGE_DTYPE, PageReader
from dtobs.recording.ring import HEADER_BYTES, describe, parse_head
from dtobs.recording.ring_tail import read_tail
from dtobs.recording.rundir import RunDirectory

BUDGET_BYTES = 16 << 20
"""Of one bundle; what does not fit comes with the next."""
META_CHUNK = 1 << 20
MOST_RECORDS = {
    "events": 4096,
    "steps": 512,
    "digests": 8,
    "pipeline": 4096,
    **{n: law.capacity // 4 for n, law in LAWS.items()},
}
"""Of one ring in one bundle. What is older than that was overtaken, and no detector waits for it."""
_FEW = 128
"""Records of a ring that are read at first: in two seconds there are seldom more."""
_AMENDED = {"steps": 16}
"""The newest records that may have been completed since they were sent (`Recorder.amend_step`)."""


@dataclass(frozen=True)
class Have:
    """What the asker has of one rank: bytes of its meta entries, the last record of each ring."""

    attach_ns: int = 0
    meta: int = 0
    rings: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """`from_json` reads it back."""
        return {"attach_ns": self.attach_ns, "meta": self.meta, "rings": self.rings}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Have:
        """Raises KeyError, TypeError, ValueError or OverflowError."""
        rings = {str(name): position(stamp) for name, stamp in value["rings"].items()}
        return cls(int(value["attach_ns"]), position(value["meta"]), rings)


def position(value: Any) -> int:
    """A place in a file or ring, as somebody else names it. Raises TypeError, ValueError or OverflowError."""
    number = int(value)
    if not 0 <= number < 1 << 63:
        raise ValueError(f"no file has a place {number}")
    return number


def collect(run: RunDirectory, node: int, have: dict[int, Have], *, exits: int = 0, detail: bool = True) -> list[Part]:
    """The pages of `node`, its exits beyond byte `exits`, and what is new of its ranks; rings only with `detail`."""
    pages = _pages(run, node)
    parts = [Part("pages", pages.tobytes(), fields=describe(PAGE_DTYPE))]
    parts += _text(run.exits(node), "exits", exits)
    for page in pages:
        rank, attempt = int(page["rank"]), int(page["attempt"])
        had = have.get(rank, Have())
        if had.attach_ns != int(page["attach_ns"]):
            had = Have()
        parts += _text(run.meta(rank, attempt), "meta", had.meta, rank, attempt)
        for name in RINGS if detail else ():
            if sum(len(part.data) for part in parts) < BUDGET_BYTES:
                path = run.ring(name, rank, attempt)
                parts += _ring(path, name, had.rings.get(name, 0), rank, attempt)
    return parts


def _pages(run: RunDirectory, node: int) -> npt.NDArray[np.void]:
    try:
        with contextlib.closing(PageReader(run.pages(node))) as reader:
            pages = reader.read()
    except RecordingError:  # no rank has recorded yet, or the file is damaged, which the monitor's loop says
        return np.zeros(0, PAGE_DTYPE)
    newest: npt.NDArray[np.void] = pages[pages["attempt"] == pages["attempt"].max()] if len(pages) else pages
    return newest


def _text(path: Path, kind: str, start: int, rank: int = -1, attempt: int = 0) -> list[Part]:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < start:
                start = 0  # another file of that name
            file.seek(start)
            data = file.read(META_CHUNK)
    except OSError:
        return []
    return [Part(kind, data, rank, attempt, start)] if data else []


def _ring(path: Path, name: str, since: int, rank: int, attempt: int) -> list[Part]:
    """The records after number `since`, and those before it that may have been completed after they were sent."""
    try:
        with path.open("rb") as file:
            _, capacity = parse_head(path, file.read(HEADER_BYTES))
        records = read_tail(path, _FEW)
        if not len(records) or int(records["stamp"][-1]) == since:
            return []
        first = since + 1 - _AMENDED.get(name, 0) if int(records["stamp"][-1]) > since else 0
        if int(records["stamp"][0]) > max(1, first) and len(records) == _FEW:
            records = read_tail(path, min(MOST_RECORDS[name], capacity))
    except (OSError, RecordingError):
        return []
    new = records[records["stamp"] >= max(0, first)][-MOST_RECORDS[name] :]
    return [Part(name, new.tobytes(), rank, attempt, 0, capacity, describe(new.dtype))]
