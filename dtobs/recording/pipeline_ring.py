"""The ring of a rank's pipeline schedule: one record for each computation, message and wait of a micro-batch."""

from __future__ import annotations

import struct
from pathlib import Path

from dtobs.events import PIPELINE_DTYPE, PIPELINE_FORMAT
from dtobs.recording.ring import HEADER_BYTES, RingWriter

PIPELINE_CAPACITY = 1 << 14
"""Records kept: some 100 steps of 8 micro-batches and two stages a rank, in 1 MiB."""


class PipelineWriter(RingWriter):
    """Appends records of PIPELINE_DTYPE; `write` costs about a microsecond.

    Raises RecordingDisabled when the file cannot be made.
    """

    def __init__(self, path: Path, capacity: int = PIPELINE_CAPACITY) -> None:
        super().__init__(path, PIPELINE_DTYPE, capacity)
        self._pack = struct.Struct(PIPELINE_FORMAT).pack_into

    def write(
        self,
        op: int,
        begin_ns: int,
        end_ns: int,
        step: int,
        micro_batch: int,
        stage: int,
        chunk: int = 0,
        peer: int = -1,
        size: float = 0.0,
    ) -> None:
        """Append one record; `size` is in bytes."""
        index = next(self._count)
        offset = HEADER_BYTES + (index % self._capacity) * self._size
        self._pack(
            *(self._map, offset, index, begin_ns, end_ns, step, micro_batch), *(op, stage, chunk, peer, size, index)
        )
