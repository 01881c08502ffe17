"""The newest records of a ring without reading the rest: a few kilobytes instead of a megabyte at every look."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dtobs.errors import RecordingError
from dtobs.recording.ring import HEADER_BYTES, parse_head, read_ring, whole_records

_AHEAD = 64
"""Slots read beyond the newest record found, at most: the writer goes on while we look."""


def read_tail(path: Path, last: int, after: int = 0) -> npt.NDArray[np.void]:
    """The newest `last` whole records, oldest first: what ``read_ring(path)[-last:]`` gives.

    Where the newest is known to be the `after`-th or one not much newer, the search for it is short.
    Raises RecordingError when the head of the file is not that of a ring of ours.
    """
    if last <= 0:
        raise ValueError(f"last must be positive, not {last}")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = _tail(path, fd, last, after)
        finally:
            os.close(fd)
    except OSError as error:
        raise RecordingError(f"cannot read {path}: {error.strerror}") from error
    return read_ring(path)[-last:] if found is None else found


def _tail(path: Path, fd: int, last: int, after: int) -> npt.NDArray[np.void] | None:
    """None where only the whole ring can tell: it is small, empty, cut, damaged, or the writer overtook us."""
    dtype, capacity = parse_head(path, os.pread(fd, HEADER_BYTES, 0))
    ahead = min(_AHEAD, max(_AHEAD // 8, last // 2))  # who asks for little, of what is written slowly
    size, count = dtype.itemsize, last + 2 * ahead
    if capacity <= count or os.fstat(fd).st_size < HEADER_BYTES + capacity * size:
        return None

    def stamp(place: int) -> int:
        # Records lie in the order of their places: the one with index i in place (i - 1) % capacity.
        slot = (place + 1) % capacity
        return int.from_bytes(os.pread(fd, 8, HEADER_BYTES + slot * size), "little")

    first = stamp(0)
    if not first:
        return None
    # The newest is the last place whose record is not older than the one in place 0.
    low, high = 0, capacity - 1
    if first <= after and (after - 1) % capacity == after - first and stamp(after - first) == after:
        low, step = after - first, 1
        while low + step < capacity and stamp(low + step) >= first:
            low, step = low + step, 2 * step
        high = min(high, low + step - 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if stamp(middle) >= first else (low, middle - 1)
    slots = (low + 1 + np.arange(-last - ahead + 1, ahead + 1)) % capacity
    records = _read(fd, slots, dtype)
    again = _read(fd, slots, dtype)
    if len(records) < count or len(again) < count:
        return None
    good = whole_records(records, again, slots, capacity)
    if not good.any() or (good[-1] and records["stamp"][-1] >= first + low):
        return None
    newest = int(records["stamp"][good].max())
    good &= records["stamp"] + np.uint64(last) > np.uint64(newest)
    chosen = records[good]
    if len(chosen) < min(last, newest):
        return None  # some were torn or overwritten: those before them take their place
    ordered: npt.NDArray[np.void] = chosen[np.argsort(chosen["stamp"], kind="stable")]
    return ordered


def _read(fd: int, slots: npt.NDArray[np.intp], dtype: np.dtype[np.void]) -> npt.NDArray[np.void]:
    """The records in `slots`, which go up by one and may go once around the end of the file."""
    turn = int(np.argmin(slots))
    parts = [part for part in (slots[:turn], slots[turn:]) if len(part)]
    data = b"".join(
        os.pread(fd, len(part) * dtype.itemsize, HEADER_BYTES + int(part[0]) * dtype.itemsize) for part in parts
    )
    return np.frombuffer(data, dtype, len(data) // dtype.itemsize)
