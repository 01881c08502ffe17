"""The samples that ranks trained on, brought together: streams of digests in the order of reading."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dtobs.recording.laws import SAMPLES, SAMPLES_EACH
from dtobs.recording.view import RunView


@dataclass(frozen=True)
class Stream:
    """What one rank read: `digests` u64[n] of samples in the order of reading, `steps` i64[n] of each.

    `batches` has a row for each step looked at: the step and how many samples it had.
    """

    rank: int
    steps: npt.NDArray[np.int64]
    digests: npt.NDArray[np.uint64]
    batches: npt.NDArray[np.int64]

    def first_repeat(self) -> int | None:
        """The step in which this rank read something for the second time; None when it never did."""
        _, first = np.unique(self.digests, return_index=True)
        again = np.ones(len(self.digests), bool)
        again[first] = False
        return int(self.steps[again].min()) if again.any() else None


def streams(view: RunView, ranks: list[int]) -> list[Stream]:
    """The stream of each of `ranks` that has one."""
    return [stream for rank in ranks if (stream := _of(view, rank)) is not None]


def _of(view: RunView, rank: int) -> Stream | None:
    records = view.law(SAMPLES, rank)
    records = records[records["count"] <= SAMPLES_EACH]
    if not len(records):
        return None
    begins = records[records["first"] == 0]
    known, place = np.unique(begins["step"], return_inverse=True)
    rows = np.zeros(len(known), np.int64)
    np.add.at(rows, place, begins["rows"])
    inside = (np.arange(SAMPLES_EACH) < records["count"][:, None]) & (records["digest"] != 0)
    steps = np.broadcast_to(records["step"][:, None], inside.shape)[inside]
    return Stream(rank, steps, records["digest"][inside], np.stack([known, rows], axis=1))
