"""The sender's side of a bundle: what has been recorded on this node since the asker last asked."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dtobs.codec import Natural, encode
from dtobs.errors import RecordingError
from dtobs.host.process import ProcessState, boot_id
from dtobs.nodes.bundle import Part, encode_bundle
from dtobs.recording.capture import Capture
from dtobs.recording.contact import Contact
from dtobs.recording.laws import LAWS
from dtobs.recording.page import PAGE_DTYPE, PageReader
from dtobs.recording.ring import HEADER_BYTES, describe, parse_head
from dtobs.recording.ring_tail import read_tail
from dtobs.recording.rundir import RunDirectory
from dtobs.recording.uncounted_time import Excused
from dtobs.recording.view import RunView

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
_SHOWN = ("steps", "events", "pipeline")
_SHOWN_RECORDS = 1 << 16
"""Of each ring of all ranks together that a viewer gets at first; of one rank no fewer than the next."""
_FEWEST_SHOWN = 64
_FEW = 128
"""Records of a ring that are read at first: in two seconds there are seldom more."""
_AMENDED = {"steps": 16}
"""The newest records that may have been completed since they were sent (`Recorder.amend_step`)."""


@dataclass(frozen=True)
class SyncCursor:
    """What the asker has of one rank: bytes of its meta entries, the last record of each ring."""

    attach_ns: int = 0
    meta: Natural = 0
    rings: dict[str, Natural] = field(default_factory=dict)


@dataclass(frozen=True)
class Question:
    """What somebody asks a monitor for: what is new since what they have. The monitor of another node says which."""

    node: int = -1
    address: str = ""
    detail: bool = False  #: the rings as well
    exits: Natural = 0  #: bytes
    journal: Natural = 0  #: bytes
    capture_ns: int = 0  #: when the capture was taken that is there
    have: dict[int, SyncCursor] = field(default_factory=dict)  #: by rank


@dataclass(frozen=True)
class RunHead:
    """What a monitor says of its whole run to a viewer, beside the pieces of files. Times are of its host's clock."""

    root: str
    host: str
    boot_id: str
    now_ns: int
    info: dict[str, Any]
    processes: dict[int, ProcessState]
    contacts: dict[int, Contact]
    excused: tuple[Excused, ...]
    damaged: tuple[str, ...]
    paused: bool
    more: bool  #: there is more than fits into one answer


def collect(
    run: RunDirectory, node: int, have: dict[int, SyncCursor], *, exits: int = 0, detail: bool = True
) -> list[Part]:
    """The pages of `node`, its exits beyond byte `exits`, and what is new of its ranks; rings only with `detail`."""
    most = MOST_RECORDS if detail else {}
    return _bounded(chain(_text(run.exits(node), "exits", exits), _of_node(run, node, have, most)))[0]


def answer_viewer(view: RunView, question: Question) -> bytes:
    """The run that `view` is a look at, for somebody who wants to see it."""
    run = RunDirectory(view.root)
    each = max(_FEWEST_SHOWN, _SHOWN_RECORDS // max(1, len(view.pages)))
    most = {name: min(each, MOST_RECORDS[name]) for name in _SHOWN} if question.detail else {}
    parts, more = _bounded(
        chain(
            _text(run.findings, "journal", question.journal),
            _capture(view.capture, question.capture_ns),
            *(_of_node(run, node, question.have, most) for node in run.nodes()),
        )
    )
    head = RunHead(
        str(view.root),
        socket.gethostname(),
        boot_id(),
        view.now_ns,
        view.info,
        view.processes,
        view.contacts,
        view.excused,
        tuple(view.damaged),
        view.paused,
        more,
    )
    return encode_bundle(vars(head), parts)


def _bounded(parts: Iterable[Part]) -> tuple[list[Part], bool]:
    """As many parts as fit into one bundle, and whether there are more."""
    taken: list[Part] = []
    size, more = 0, False
    for part in parts:
        taken.append(part)
        size += len(part.data)
        more |= len(part.data) == META_CHUNK
        if size >= BUDGET_BYTES:
            return taken, True
    return taken, more


def _of_node(run: RunDirectory, node: int, have: dict[int, SyncCursor], most: dict[str, int]) -> Iterator[Part]:
    """The pages of `node` and what is new of its ranks; of the rings no more than the `most` newest records."""
    pages = _pages(run, node)
    yield Part("pages", pages.tobytes(), fields=describe(PAGE_DTYPE))
    for page in pages:
        rank, attempt = int(page["rank"]), int(page["attempt"])
        had = have.get(rank, SyncCursor())
        if had.attach_ns != int(page["attach_ns"]):
            had = SyncCursor()
        yield from _text(run.meta(rank, attempt), "meta", had.meta, rank, attempt)
        for name, last in most.items():
            yield from _ring(run.ring(name, rank, attempt), name, had.rings.get(name, 0), last, rank, attempt)


def _capture(capture: Capture | None, known_ns: int) -> list[Part]:
    """The stacks of the last capture, when they are not known and fit into an answer."""
    if capture is None or capture.taken_ns == known_ns:
        return []
    ranks = {rank: replace(seen, flight_recorder=None) for rank, seen in capture.ranks.items()}
    data = encode(replace(capture, ranks=ranks)).encode()
    return [Part("capture", data)] if len(data) <= BUDGET_BYTES else []


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


def _ring(path: Path, name: str, since: int, most: int, rank: int, attempt: int) -> list[Part]:
    """The records after number `since`, and those before it that may have been completed after they were sent."""
    try:
        with path.open("rb") as file:
            _, capacity = parse_head(path, file.read(HEADER_BYTES))
        records = read_tail(path, _FEW)
        if not len(records) or int(records["stamp"][-1]) == since:
            return []
        first = since + 1 - _AMENDED.get(name, 0) if int(records["stamp"][-1]) > since else 0
        if int(records["stamp"][0]) > max(1, first) and len(records) == _FEW and most > _FEW:
            records = read_tail(path, min(most, capacity))
    except (OSError, RecordingError):
        return []
    new = records[records["stamp"] >= max(0, first)][-most:]
    return [Part(name, new.tobytes(), rank, attempt, 0, capacity, describe(new.dtype))]
