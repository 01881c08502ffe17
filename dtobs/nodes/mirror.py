"""The receiver's side of a bundle: another node's recording, kept in this run directory as if that node wrote here.

That is all a diagnosis needs to cover nodes without a shared disk: pages, rings and entries have their usual places
and formats, so whatever reads a run directory reads them, while the job lives and after it died.

What comes from another machine is not believed: ranks may only be those of that node's own pages, paths are made of
numbers, rings must have formats of ours, and every file is bounded.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dtobs.codec import encode
from dtobs.errors import RecordingDisabled, RecordingError, ServiceError
from dtobs.events import SCHEMA
from dtobs.nodes.bundle import RINGS, Part
from dtobs.nodes.sharing import SyncCursor
from dtobs.recording import page as pages_file
from dtobs.recording.meta import MAX_BYTES as MAX_META_BYTES
from dtobs.recording.page import HALF_BYTES, MAX_WORLD, PAGE_DTYPE, SLOT_BYTES, plausible
from dtobs.recording.ring import HEADER_BYTES, MAGIC, describe, parse_head
from dtobs.recording.rundir import RunDirectory, private_folder, write_private

MAX_RANKS = 4096
"""Of one node."""
MAX_EXITS_BYTES = 4 << 20


class NodeMirror:
    """Keeps the recording of `node` up to date in `run`."""

    def __init__(self, run: RunDirectory, node: int) -> None:
        self._run, self._node = run, node
        self.exits = 0  #: bytes of exits.jsonl taken
        self.have: dict[int, SyncCursor] = {}  #: by rank
        self.pages: npt.NDArray[np.void] = np.zeros(0, PAGE_DTYPE)

    def apply(self, parts: list[Part], others: frozenset[int] = frozenset(), skew_ns: int = 0) -> None:
        """Take over a bundle; `others` are ranks that cannot be that node's in this attempt.

        `skew_ns` is added to that node's idea of UTC, by which its times are compared with ours.
        Raises ServiceError when its content cannot be right, RecordingDisabled when the disk refuses.
        """
        told = [p for p in parts if p.kind == "pages"]
        if len(told) != 1:
            raise ServiceError("the answer of that monitor holds no pages")
        pages = self._checked(told[0], others)
        try:
            if len(pages) and not self._older(pages):
                if skew_ns:
                    _set_right(pages, skew_ns)
                self._begin(pages)
                for part in parts:
                    self._take(part)
                _write_pages(self._run.pages(self._node), pages)
                self.pages = pages
        except OSError as error:
            where = self._run.node(self._node)
            raise RecordingDisabled(f"cannot keep what node {self._node} says in {where}: {error.strerror}") from error

    def _checked(self, part: Part, others: frozenset[int]) -> npt.NDArray[np.void]:
        node_of(part)
        pages: npt.NDArray[np.void] = np.frombuffer(part.data, PAGE_DTYPE).copy()
        if not len(pages):
            return pages
        ranks = pages["rank"]
        if (
            len(pages) > MAX_RANKS
            or len(np.unique(ranks)) < len(ranks)
            or (pages["node"] != self._node).any()
            or not plausible(pages).all()
            or not 0 <= int(pages["attempt"].min()) == int(pages["attempt"].max()) < 1 << 31
            or not others.isdisjoint(ranks.tolist())
        ):
            raise ServiceError(f"the pages that came as those of node {self._node} are not its own")
        return pages

    def _older(self, pages: npt.NDArray[np.void]) -> bool:
        """Whether the pages are of the same ranks' processes, and from before what is known."""
        known = self.pages
        same = len(known) == len(pages) and (known["attach_ns"] == pages["attach_ns"]).all()
        return bool(same and known["heartbeat_ns"].max() > pages["heartbeat_ns"].max())

    def _begin(self, pages: npt.NDArray[np.void]) -> None:
        """Start a rank anew when its process has attached anew."""
        for page in pages:
            rank, attached = int(page["rank"]), int(page["attach_ns"])
            if self.have.get(rank, SyncCursor()).attach_ns != attached:
                self.have[rank] = SyncCursor(attached)
                private_folder(self._run.rank(rank))
                attempt = int(page["attempt"])
                for name in RINGS:
                    self._run.ring(name, rank, attempt).unlink(missing_ok=True)
                self._run.meta(rank, attempt).unlink(missing_ok=True)
        mine = set(pages["rank"].tolist())
        self.have = {rank: have for rank, have in self.have.items() if rank in mine}

    def _take(self, part: Part) -> None:
        if part.kind == "exits":
            private_folder(self._run.node(self._node))
            self.exits = append(self._run.exits(self._node), part, MAX_EXITS_BYTES)
        elif part.kind in ("meta", *RINGS) and part.rank in self.have:
            had = self.have[part.rank]
            if part.kind == "meta":
                end = append(self._run.meta(part.rank, part.attempt), part, MAX_META_BYTES)
                self.have[part.rank] = replace(had, meta=end)
            else:
                path = self._run.ring(part.kind, part.rank, part.attempt)
                self.have[part.rank] = SyncCursor(
                    had.attach_ns, had.meta, had.rings | {part.kind: _write_ring(path, part)}
                )


def node_of(part: Part) -> int:
    """The node whose pages these are, 0 when there are none. Raises ServiceError when they are no pages."""
    size = PAGE_DTYPE.itemsize
    if list(part.fields) != describe(PAGE_DTYPE) or len(part.data) % size:
        raise ServiceError("the pages of that monitor are of another version of dtobs")
    nodes = np.frombuffer(part.data, PAGE_DTYPE)["node"]
    if len(nodes) and not 0 <= int(nodes[0]) < MAX_WORLD:
        raise ServiceError(f"that monitor tells of a node {nodes[0]}")
    return int(nodes[0]) if len(nodes) else 0


def append(path: Path, part: Part, most: int) -> int:
    """Write text to its place; returns where the next begins."""
    end = part.start + len(part.data)
    if end > most:
        return part.start
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(fd).st_size < part.start:
            return 0  # something is missing before it: ask for all of it
        os.pwrite(fd, part.data, part.start)
        os.ftruncate(fd, end)
    finally:
        os.close(fd)
    return end


def _write_ring(path: Path, part: Part) -> int:
    """Put the records into their slots; returns the last one's index. Raises ServiceError, OSError."""
    header = encode({"schema": SCHEMA, "capacity": part.capacity, "fields": part.fields}, separators=None).encode()
    head = (MAGIC + len(header).to_bytes(4, "little") + header).ljust(HEADER_BYTES, b"\0")
    try:
        dtype, capacity = parse_head(path, head[:HEADER_BYTES])
    except RecordingError as error:
        raise ServiceError(f"that monitor sent a ring that is none: {error}") from error
    size = dtype.itemsize
    if len(head) != HEADER_BYTES or len(part.data) % size or len(part.data) > capacity * size:
        raise ServiceError(f"that monitor sent {len(part.data)} bytes for a ring of {capacity} records")
    records = np.frombuffer(part.data, dtype)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.pread(fd, HEADER_BYTES, 0) != head:
            os.ftruncate(fd, 0)
            os.ftruncate(fd, HEADER_BYTES + capacity * size)
            os.pwrite(fd, head, 0)
        for record in records:
            slot = int(record["stamp"]) % capacity
            os.pwrite(fd, record.tobytes(), HEADER_BYTES + slot * size)
    finally:
        os.close(fd)
    return int(records["stamp"].max()) if len(records) else 0


def _set_right(pages: npt.NDArray[np.void], skew_ns: int) -> None:
    """Rewrite the UTC offset in every complete page."""
    for n in range(len(pages)):
        row = pages[n : n + 1]
        if zlib.crc32(row.tobytes()[8:]) == int(row["crc"][0]):
            row["clock_offset_ns"] += skew_ns
            row["crc"] = zlib.crc32(row.tobytes()[8:])


def _write_pages(path: Path, pages: npt.NDArray[np.void]) -> None:
    """The page file as the ranks themselves would have made it, replaced whole."""
    header = pages_file.header()
    slots = np.zeros((len(pages), SLOT_BYTES), np.uint8)
    raw = pages.view(np.uint8).reshape(len(pages), PAGE_DTYPE.itemsize)
    where = (pages["seq"] & np.uint64(1)).astype(np.intp) * HALF_BYTES
    for slot, offset in enumerate(where.tolist()):
        slots[slot, offset : offset + PAGE_DTYPE.itemsize] = raw[slot]
    write_private(path, header + slots.tobytes())
