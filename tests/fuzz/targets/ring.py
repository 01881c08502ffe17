"""A ring of events or steps: read whole, its tail, and adapted to what this version expects."""

from __future__ import annotations

from random import Random

import numpy as np

from dtobs.errors import RecordingError
from dtobs.events import EVENT_DTYPE, PIPELINE_DTYPE, STEP_DTYPE, digest_dtype
from dtobs.recording.ring import HEADER_BYTES, RingWriter, adapt, read_ring
from dtobs.recording.ring_tail import read_tail
from tests.fuzz.expect import one_line
from tests.fuzz.mutate import json_mutator, mutate_bytes
from tests.fuzz.scratch import scratch

_FOLDER = scratch("ring")
_PATH = _FOLDER / "x.ring"


def _seed(dtype: np.dtype[np.void], capacity: int, count: int) -> bytes:
    path = _FOLDER / "seed.ring"
    ring = RingWriter(path, dtype, capacity)
    for number in range(count):
        record = np.zeros((), dtype)
        record[dtype.names[1]] = number
        ring.append(record)
    ring.close()
    return path.read_bytes()


SEEDS = [
    _seed(EVENT_DTYPE, 16, 40),
    _seed(EVENT_DTYPE, 160, 200),
    _seed(STEP_DTYPE, 4, 3),
    _seed(PIPELINE_DTYPE, 8, 0),
    _seed(digest_dtype(3), 4, 9),
]


def check(data: bytes) -> bool:
    """Records in order, or one RecordingError. Returns whether it was read."""
    whole = 0
    _PATH.write_bytes(data)
    for read in (read_ring, lambda path: read_tail(path, 5)):
        try:
            records = read(_PATH)
        except RecordingError as error:
            one_line(error)
            continue
        whole += 1
        stamps = records["stamp"].astype(np.uint64)
        assert (stamps[1:] > stamps[:-1]).all()
        for expected in (EVENT_DTYPE, STEP_DTYPE, PIPELINE_DTYPE):
            try:
                assert len(adapt(_PATH, records, expected)) == len(records)
            except RecordingError as error:
                one_line(error)
    return whole == 2


def mutate(data: bytes, random: Random) -> bytes:
    """Change the header as JSON, or bytes anywhere."""
    length = int.from_bytes(data[8:12], "little")
    if random.random() < 0.5 and len(data) > HEADER_BYTES and length < HEADER_BYTES:
        header = json_mutator(data[12 : 12 + length], random)[: HEADER_BYTES - 12]
        head = data[:8] + len(header).to_bytes(4, "little") + header
        return head.ljust(HEADER_BYTES, b"\0") + data[HEADER_BYTES:]
    return mutate_bytes(data, random)
