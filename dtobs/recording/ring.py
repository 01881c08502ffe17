"""Memory-mapped rings of fixed-size records: the events, the step history and the parameter digests of a rank.

A record carries its 1-based index first and last. The two differ when a writer was killed inside the record, and
a slot whose index is not the one that belongs there has been overwritten: both are left out by the reader. So is a
record that changes while it is being read: the file is read twice. The file describes its own fields, so that a
reader of another version can still make sense of it.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import re
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from dtobs.codec import decode, parse
from dtobs.errors import RecordingDisabled, RecordingError
from dtobs.events import EVENT_DTYPE, EVENT_FORMAT, SCHEMA
from dtobs.recording.rundir import private_folder

MAGIC = b"DTOBSRG1"
HEADER_BYTES = 4096
MAX_BODY_BYTES = 64 << 20
_FIELD = re.compile(r"[<|][uif][1248]$")

_NO_STAMP = bytes(8)
_NOT_MEASURED = {"nonfinite": -1, "nonfinite_param": -1}  # for other integers it is 0

MOST_HEADS = 64
_heads: dict[bytes, tuple[np.dtype[np.void], int]] = {}  # parsed; all ranks of a run have the same few

EVENT_CAPACITY = 8192
STEP_CAPACITY = 4096
DIGEST_BYTES = 4 << 20


class RingWriter:
    """Appends records of `dtype` (first field ``stamp``, last ``stamp_end``, both u64) to a file of `capacity` records.

    The file is always a new one: a process that still writes to one of the same name keeps its own.
    Raises RecordingDisabled when the file cannot be made, or would be larger than a reader accepts.
    """

    def __init__(self, path: Path, dtype: np.dtype[np.void], capacity: int) -> None:
        header = json.dumps({"schema": SCHEMA, "capacity": capacity, "fields": describe(dtype)}).encode()
        assert len(header) + 12 <= HEADER_BYTES
        size = HEADER_BYTES + capacity * dtype.itemsize
        if size > HEADER_BYTES + MAX_BODY_BYTES:
            raise RecordingDisabled(f"cannot record to {path}: {size >> 20} MiB are more than a ring may take")
        try:
            private_folder(path.parent)
            # Truncating it would be a SIGBUS in a process that still has it mapped.
            path.unlink(missing_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.posix_fallocate(fd, 0, size)  # reserved: a full disk is an error here, not a SIGBUS later
                os.pwrite(fd, MAGIC + len(header).to_bytes(4, "little") + header, 0)
                self._map = mmap.mmap(fd, size)
            finally:
                os.close(fd)
        except OSError as error:
            raise RecordingDisabled(f"cannot record to {path}: {error.strerror}") from error
        self.dtype = dtype
        self._capacity = capacity
        self._count = itertools.count(1)
        self._last = 0
        self._size = dtype.itemsize

    def append(self, record: npt.NDArray[np.void]) -> None:
        """Append one record, a 0-d or 1-element array of `dtype`; its stamps are filled in here."""
        index = next(self._count)
        record["stamp"] = index
        record["stamp_end"] = index
        data = record.tobytes()
        start = HEADER_BYTES + (index % self._capacity) * self._size
        # A copy writes its bytes in any order: while it lasts the slot has no stamp.
        self._map[start : start + 8] = _NO_STAMP
        self._map[start + 8 : start + self._size] = data[8:]
        self._map[start : start + 8] = data[:8]

        self._last = index

    def amend(self, back: int, field: str, value: float) -> bool:
        """Set one 8-byte field of the record appended `back` records before the last one (0 is the last).

        For values that a device hands over late. False when that record has been overwritten or never was.
        """
        start = self._offset(back, field)
        if start is None:
            return False
        self._map[start : start + 8] = np.asarray(value, self.dtype[field]).tobytes()
        return True

    def field(self, back: int, field: str) -> int | float | None:
        """One 8-byte field of a record counted as in `amend`; None when there is no such record."""
        start = self._offset(back, field)
        if start is None:
            return None
        found: int | float = np.frombuffer(self._map[start : start + 8], self.dtype[field])[0].item()
        return found

    def _offset(self, back: int, field: str) -> int | None:
        index = self._last - back
        if index < 1 or not 0 <= back < self._capacity:
            return None
        offset: int = self.dtype.fields[field][1]  # type: ignore[index]
        return HEADER_BYTES + (index % self._capacity) * self._size + offset

    def close(self) -> None:
        """Unmap; the file stays."""
        self._map.close()


class EventWriter(RingWriter):
    """The ring of events; `write` costs about half a microsecond and may be called from any thread."""

    def __init__(self, path: Path, capacity: int = EVENT_CAPACITY) -> None:
        super().__init__(path, EVENT_DTYPE, capacity)
        self._pack = struct.Struct(EVENT_FORMAT).pack_into

    def write(
        self,
        kind: int,
        phase: int = 0,
        step: int = 0,
        group: int = 0,
        op: int = 0,
        site: int = 0,
        thread: int = 0,
        seq: int = 0,
        value: float = 0.0,
    ) -> int:
        """Append one event stamped with the present time; returns that time in ns."""
        index = next(self._count)
        now = time.monotonic_ns()
        offset = HEADER_BYTES + (index % self._capacity) * 64
        self._pack(self._map, offset, index, now, kind, phase, step, group, op, site, thread, seq, value, index)
        return now


def describe(dtype: np.dtype[np.void]) -> list[list[Any]]:
    """The fields of `dtype` as JSON: [name, format] or [name, format, count]."""
    fields: list[list[Any]] = []
    for name in dtype.names or ():
        base, shape = dtype[name].base, dtype[name].shape
        fields.append([name, base.str, shape[0]] if shape else [name, base.str])
    return fields


def read_ring(path: Path) -> npt.NDArray[np.void]:
    """The whole records of a ring, oldest first; works on a file that is being written or was cut short.

    Raises RecordingError when the head of the file is not that of a ring of ours.
    """
    try:
        with path.open("rb") as file:
            head = file.read(HEADER_BYTES)
            dtype, capacity = parse_head(path, head)
            records = _slots(file, dtype, capacity)
            again = _slots(file, dtype, capacity)
    except OSError as error:
        raise RecordingError(f"cannot read {path}: {error.strerror}") from error
    slots = min(len(records), len(again))
    records = records[:slots]
    good = whole_records(records, again[:slots], np.arange(slots), capacity)
    stamps = records["stamp"]
    if not good.any():
        return records[:0].copy()
    # The newest whole record bounds what can still be valid.
    newest = int(stamps[good].max())
    good &= stamps + np.uint64(capacity) > np.uint64(newest)
    chosen = records[good]
    ordered: npt.NDArray[np.void] = chosen[np.argsort(chosen["stamp"], kind="stable")]
    return ordered


def adapt(path: Path, records: npt.NDArray[np.void], expected: np.dtype[np.void]) -> npt.NDArray[np.void]:
    """Records of another version as `expected`: fields by name; what was not recorded then is "not measured".

    Raises RecordingError when a field means something else here.
    """
    if records.dtype == expected:
        return records
    adapted = np.zeros(len(records), expected)
    for name in expected.names or ():
        if name in (records.dtype.names or ()):
            if records.dtype[name] != expected[name]:
                raise RecordingError(f"{path}: written by another version of dtobs, {name!r} is not the same there")
            adapted[name] = records[name]
        elif expected[name].kind == "f":
            adapted[name] = np.nan
        elif name in _NOT_MEASURED:
            adapted[name] = _NOT_MEASURED[name]
    return adapted


def joined(parts: Sequence[npt.NDArray[np.void]]) -> npt.NDArray[np.void]:
    """Records of one type in a row. Given them as they are, `np.concatenate` compares their types field by field."""
    raw = np.concatenate([np.ascontiguousarray(part).view(f"V{part.itemsize}") for part in parts])
    return raw.view(parts[0].dtype)


def whole_records(
    records: npt.NDArray[np.void], again: npt.NDArray[np.void], slots: npt.NDArray[np.intp], capacity: int
) -> npt.NDArray[np.bool_]:
    """bool[n]: which of `records`, read from `slots` of a ring and then once more as `again`, are whole.

    A slot's index follows from its position, and a record that was being written when we passed has changed since.
    """
    stamps = records["stamp"]
    good: npt.NDArray[np.bool_] = (
        (stamps != 0)
        & (stamps == records["stamp_end"])
        & (stamps % np.uint64(capacity) == slots.astype(np.uint64))
        & (_rows(records) == _rows(again)).all(axis=1)
    )
    return good


def _slots(file: BinaryIO, dtype: np.dtype[np.void], capacity: int) -> npt.NDArray[np.void]:
    # No more than the file has: what its head says must not make us reserve memory.
    there = max(0, os.fstat(file.fileno()).st_size - HEADER_BYTES)
    file.seek(HEADER_BYTES)
    body = file.read(min(there, capacity * dtype.itemsize))
    return np.frombuffer(body, dtype, len(body) // dtype.itemsize)


def _rows(records: npt.NDArray[np.void]) -> npt.NDArray[np.uint8]:
    return records.view(np.uint8).reshape(len(records), records.dtype.itemsize)


@dataclass(frozen=True)
class _Head:
    """What a ring says of itself: a field is (name, format) or (name, format, count)."""

    schema: int
    capacity: int
    fields: tuple[tuple[str, str] | tuple[str, str, int], ...]


def parse_head(path: Path, head: bytes) -> tuple[np.dtype[np.void], int]:
    """The records' type and their number, from the first `HEADER_BYTES` of a ring. Raises RecordingError."""
    known = _heads.get(head)
    if known is None:
        known = _parse_head(path, head)
        if len(_heads) < MOST_HEADS:
            _heads[head] = known
    return known


def _parse_head(path: Path, head: bytes) -> tuple[np.dtype[np.void], int]:
    if head[:8] != MAGIC:
        raise RecordingError(f"{path} is not a dtobs ring")
    length = int.from_bytes(head[8:12], "little")
    try:
        meta = decode(_Head, parse(head[12 : 12 + length]))
        if meta.schema > SCHEMA:
            raise RecordingError(f"{path}: schema {meta.schema} is newer than this dtobs ({SCHEMA}): upgrade dtobs")
        fields: list[Any] = []
        for name, kind, *count in meta.fields:
            if not _FIELD.match(kind):
                raise ValueError(f"field format {kind!r}")
            fields.append((name, kind, tuple(count)) if count else (name, kind))
        dtype = np.dtype(fields)
        first, last, capacity = fields[0], fields[-1], meta.capacity
    except (ValueError, TypeError, IndexError, OverflowError, MemoryError) as error:
        raise RecordingError(f"{path}: damaged header ({error})") from error
    if first[:2] != ("stamp", "<u8") or last[:2] != ("stamp_end", "<u8"):
        raise RecordingError(f"{path}: damaged header (no stamps)")
    if capacity <= 0 or capacity * dtype.itemsize > MAX_BODY_BYTES:
        raise RecordingError(f"{path}: damaged header (capacity {capacity}, record of {dtype.itemsize} bytes)")
    return dtype, capacity
