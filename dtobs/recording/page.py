"""The page of a rank: its current values, in one memory-mapped file per node.

File ``nodes/<5-digit node>/pages.bin``: a 4096-byte header, then one slot per rank of the node. A slot holds two
copies of the page. A commit writes the older copy and then counts as the newer one, and each copy carries a
checksum, so at any instant at least one copy is whole, on any processor and after SIGKILL. All slots of a node
are read at once; a slot that changed under the reader so fast that both copies broke is read again.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import mmap
import os
import struct
from pathlib import Path
from time import monotonic_ns
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from dtobs.codec import DecodeError, decode, parse
from dtobs.errors import RecordingDisabled, RecordingError
from dtobs.events import FORMAT_FIELDS, SCHEMA
from dtobs.recording.rundir import private_folder

MAGIC = b"DTOBSPG1"
HEADER_BYTES = 4096
HALF_BYTES = 1024
SLOT_BYTES = 2 * HALF_BYTES
MAX_WORLD = 1 << 21
"""Ranks that a job may have; a larger number is damage."""
MAX_NS = 1 << 61  #: 73 years: no clock says more, and the sum of two such times fits into an int64
MAX_SLOTS = 1 << 17  #: of a file; more is damage, not a node

PAGE_INTS = (
    # who
    "rank",
    "local_rank",
    "node",
    "world_size",
    "attempt",
    "pid",
    "start_ticks",  # /proc/PID/stat field 22: tells a process from a later one with the same pid
    "attach_ns",
    "clock_offset_ns",  # UTC minus monotonic, at attach
    # where
    "state",
    "heartbeat_ns",  # time of the last commit
    "step",
    "steps_done",  # steps completed in this attempt
    "step_begin_ns",
    "phase",
    "phase_begin_ns",
    # collectives
    "collective_group",
    "collective_seq",
    "collective_op",
    "collective_site",
    "collective_ns",
    "wait_since_ns",  # the host has been blocked on communication since; 0 when it is not
    "collectives",
    # last completed step
    "step_ns",
    "busy_ns",
    "exposed_ns",
    "data_ns",
    "nonfinite_steps",
    "micro_batches",
    # dtobs itself
    "probe_ns",
    "probe_failures",
    "events",
    "hang_timeout_ns",  # 0: adaptive with the default floor
    "phase_allowance_ns",  # longest time the present phase may take by declaration; 0: none
)
PAGE_FLOATS = (
    "loss",
    "validation_loss",
    "tokens",  # of this rank, since attach
    "global_tokens",
    "learning_rate",
    "local_norm",
    "reduced_norm",
    "loss_scale",
    "model_flops",  # of this rank in the last step
    "hardware_flops",  # the same with what is computed again in the backward pass
    "collective_bytes",  # since attach
    "rss_bytes",
    "device_bytes",
    "device_peak_bytes",
    "device_total_bytes",
    "checkpoint_seconds",
    "checkpoint_bytes",
    "checkpoint_utc",  # UTC seconds of the last finished checkpoint
    *FORMAT_FIELDS,  # of the last step that reported them
)
_HEAD = ("crc", "seq")
PAGE_DTYPE = np.dtype(
    [("crc", "<u8"), ("seq", "<u8"), *[(n, "<i8") for n in PAGE_INTS], *[(n, "<f8") for n in PAGE_FLOATS]]
)
INDEX: dict[str, int] = {name: i for i, name in enumerate((*_HEAD, *PAGE_INTS, *PAGE_FLOATS))}
"""Index of each field in `PageWriter.ints` or `.floats` (8-byte units)."""
assert PAGE_DTYPE.itemsize <= HALF_BYTES
assert len(INDEX) * 8 == PAGE_DTYPE.itemsize

_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux
_RETRIES = 8
_MOST_HEADERS = 16
_ours: set[bytes] = set()
"""Headers that were read and found to be of this version: that of every node is the same."""
_SEQ = INDEX["seq"]
_HEARTBEAT = INDEX["heartbeat_ns"]


class PageWriter:
    """One rank's page. Set fields in `ints` / `floats` by `INDEX`, then `commit()`: about a microsecond.

    Its slot is that of its local rank, or the next one that no living rank has and none of the same attempt has had:
    where each process sees one device, programs say that all of them are local rank 0. `rank` and `attempt` say whose
    page it will be.

    Raises RecordingDisabled when the file cannot be made (no space, no permission).
    """

    def __init__(self, path: Path, local_rank: int, *, rank: int = 0, attempt: int = 0) -> None:
        try:
            private_folder(path.parent)
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                offset = HEADER_BYTES + _claim(fd, local_rank, rank, attempt) * SLOT_BYTES
                # Reserved, not sparse: a store into a sparse page of a full disk would be a SIGBUS.
                os.posix_fallocate(fd, 0, HEADER_BYTES)
                os.posix_fallocate(fd, offset, SLOT_BYTES)
                os.pwrite(fd, header(), 0)
                self._map = mmap.mmap(fd, offset + SLOT_BYTES)
            finally:
                os.close(fd)
        except OSError as error:
            raise RecordingDisabled(f"cannot record to {path}: {error.strerror}") from error
        self._offset = offset
        self._buffer = bytearray(PAGE_DTYPE.itemsize)
        view = memoryview(self._buffer)
        self.ints: memoryview[int] = view.cast("q")
        self.floats: memoryview[float] = view.cast("d")
        for name in PAGE_FLOATS:
            self.floats[INDEX[name]] = float("nan")
        # A torn-down slot of an earlier attempt must lose against our first commit.
        previous = np.frombuffer(self._map, np.uint64, SLOT_BYTES // 8, offset).reshape(2, -1)
        self._count = itertools.count(int(previous[:, 1].max() & np.uint64(0x7FFFFFFFFFFF)) + 1)
        del previous
        self._pack = struct.Struct(f"<Q{PAGE_DTYPE.itemsize - 8}s").pack_into

    def set(self, **values: float) -> None:
        """Set fields by name (not for hot paths)."""
        for name, value in values.items():
            if name in PAGE_FLOATS:
                self.floats[INDEX[name]] = value
            else:
                self.ints[INDEX[name]] = int(value)

    def get(self, name: str) -> float:
        """The value that the next commit publishes."""
        return self.floats[INDEX[name]] if name in PAGE_FLOATS else self.ints[INDEX[name]]

    def commit(self) -> None:
        """Publish the fields; never waits. Threads may call it at once: each takes a number, then copies the fields.

        So the copy with the highest number has what every thread set before it took its own. A thread that was kept
        from its core in between may have written an old copy over a newer one: it sees a later number and publishes
        again. Whatever runs here for the first time since the caches were lost costs 10 µs: so there is little of it.
        """
        ints = self.ints
        while True:
            seq = next(self._count)
            if ints[_SEQ] > seq:
                continue
            ints[_SEQ] = seq
            ints[_HEARTBEAT] = monotonic_ns()
            body = self._buffer[8:]  # a copy: another thread may set fields before the checksum is written
            self._pack(self._map, self._offset + (seq & 1) * HALF_BYTES, crc32(body), body)
            if ints[_SEQ] == seq:
                return

    def close(self) -> None:
        """Unmap; the file stays."""
        self._map.close()


def _claim(fd: int, local_rank: int, rank: int, attempt: int) -> int:
    """A slot that is this open file's while it is mapped; that of `local_rank` where files cannot be locked."""
    for slot in range(local_rank, MAX_SLOTS):
        start = HEADER_BYTES + slot * SLOT_BYTES
        wanted, again = (
            struct.pack(_FLOCK, what, os.SEEK_SET, start, SLOT_BYTES, 0) for what in (fcntl.F_WRLCK, fcntl.F_UNLCK)
        )
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, wanted)
            if not _was_a_peers(os.pread(fd, SLOT_BYTES, start), rank, attempt):
                return slot
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, again)
        except BlockingIOError:
            continue
        except OSError:
            break
    return local_rank


def _was_a_peers(data: bytes, rank: int, attempt: int) -> bool:
    """Whether a slot holds what another rank of this attempt, which has ended since, has left of itself."""
    pages = _slots(data)
    half = _whole(pages[0], int(pages[0]["seq"].argmax())) if len(pages) else None
    return half is not None and int(pages[0][half]["attempt"]) == attempt and int(pages[0][half]["rank"]) != rank


def header() -> bytes:
    """The first `HEADER_BYTES` of a page file."""
    text = json.dumps({"schema": SCHEMA, "slot_bytes": SLOT_BYTES, "fields": _fields()}).encode()
    return (MAGIC + len(text).to_bytes(4, "little") + text).ljust(HEADER_BYTES, b"\0")


def _fields() -> list[list[str]]:
    return [[name, PAGE_DTYPE[name].str] for name in PAGE_DTYPE.names or ()]


def plausible(pages: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """bool[n]: which pages could be a rank's: numbers of ranks in range, and times that can be added up.

    A page whose checksum is right can still be somebody's invention.
    """
    good = (pages["rank"] >= 0) & (pages["rank"] < pages["world_size"]) & (pages["world_size"] <= MAX_WORLD)
    for name in PAGE_INTS:
        if name.endswith("_ns"):
            good &= (pages[name] >= -MAX_NS) & (pages[name] <= MAX_NS)
    return np.asarray(good)


class PageReader:
    """All pages of one node. `read()` may be called at any time, also while ranks write.

    Raises RecordingError when `path` is not a page file of this version.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.torn: list[int] = []  #: slots whose two copies were both broken at the last `read()`
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise RecordingError(f"cannot read {path}: {error.strerror}") from error
        try:
            self._check(self._pread(HEADER_BYTES, 0))
        except BaseException:
            self.close()
            raise

    def _pread(self, count: int, offset: int) -> bytes:
        # Not a mapping: reading one of a file that has become shorter would be a SIGBUS.
        try:
            return os.pread(self._fd, count, offset)
        except OSError as error:
            raise RecordingError(f"cannot read {self._path}: {error.strerror}") from error

    def _check(self, head: bytes) -> None:
        if head in _ours:
            return
        if head[:8] != MAGIC:
            raise RecordingError(f"{self._path} is not a dtobs page file")
        length = int.from_bytes(head[8:12], "little")
        try:
            meta = decode(dict[str, Any], parse(head[12 : 12 + length]))
            fields = [list(field) for field in decode(list[tuple[str, str]], meta.get("fields"))]
            schema = decode(int, meta.get("schema"))
        except DecodeError as error:
            raise RecordingError(f"{self._path}: damaged header ({error})") from error
        if schema > SCHEMA or fields != _fields():
            differs = f"schema {schema}, ours is {SCHEMA}" if schema > SCHEMA else "a page has other fields there"
            raise RecordingError(f"{self._path}: written by another version of dtobs ({differs})")
        if len(_ours) < _MOST_HEADERS:
            _ours.add(head)

    def read(self) -> npt.NDArray[np.void]:
        """The pages that hold a value, as PAGE_DTYPE[n] in slot order. Raises RecordingError."""
        slots = max(0, (os.fstat(self._fd).st_size - HEADER_BYTES) // SLOT_BYTES)
        if slots > MAX_SLOTS:
            raise RecordingError(f"{self._path}: damaged, it has room for {slots} ranks")
        pages = _slots(self._pread(slots * SLOT_BYTES, HEADER_BYTES))
        chosen = (pages["seq"][:, 1] > pages["seq"][:, 0]).astype(np.intp)
        found: list[int] = []
        self.torn = []
        for slot in np.flatnonzero(pages["seq"].any(axis=1)).tolist():
            half = _whole(pages[slot], int(chosen[slot]))
            for _ in range(_RETRIES):
                if half is not None:
                    break
                again = _slots(self._pread(SLOT_BYTES, HEADER_BYTES + slot * SLOT_BYTES))
                pages[slot] = again[0] if len(again) else 0
                half = _whole(pages[slot], int(pages["seq"][slot].argmax()))
            if half is None:
                self.torn.append(slot)
            else:
                found.append(slot * 2 + half)
        return pages.reshape(-1)[found]

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _slots(data: bytes) -> npt.NDArray[np.void]:
    """The two copies of each whole slot in `data`, PAGE_DTYPE[n, 2]."""
    slots = len(data) // SLOT_BYTES
    raw = np.frombuffer(data, np.uint8, slots * SLOT_BYTES).reshape(slots * 2, HALF_BYTES)
    return np.ascontiguousarray(raw[:, : PAGE_DTYPE.itemsize]).view(PAGE_DTYPE).reshape(slots, 2)


def _whole(halves: npt.NDArray[np.void], first: int) -> int | None:
    """Which of a slot's two copies is whole, `first` preferred; None when neither is."""
    for half in (first, 1 - first):
        page = halves[half]
        if page["seq"] and crc32(page.tobytes()[8:]) == int(page["crc"]):
            return half
    return None
