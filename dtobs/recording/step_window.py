"""The step records of several ranks, side by side."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dtobs.events import STEP_DTYPE
from dtobs.recording.ring import joined


@dataclass(frozen=True)
class StepWindow:
    """Step records of all ranks, aligned by step number.

    `steps` is int64[S] ascending; `records` is STEP_DTYPE[R, S]; `valid` is bool[R, S], False where a rank has no
    record of that step. Rows follow `RunView.ranks`.
    """

    steps: npt.NDArray[np.int64]
    records: npt.NDArray[np.void]
    valid: npt.NDArray[np.bool_]

    def field(self, name: str) -> npt.NDArray[np.float64]:
        """float64[R, S] of one field, NaN where there is no record. Digests need `records[name]` (exact u64)."""
        values = self.records[name].astype(np.float64)
        values[~self.valid] = np.nan
        return values

    def complete(self) -> StepWindow:
        """Only the steps that every rank has."""
        keep = self.valid.all(axis=0) if len(self.valid) else np.zeros(len(self.steps), bool)
        return StepWindow(self.steps[keep], self.records[:, keep], self.valid[:, keep])


def aligned(histories: list[npt.NDArray[np.void]], last: int) -> StepWindow:
    """The newest `last` steps of any of `histories` (STEP_DTYPE, oldest first, one a rank), side by side."""
    every = [h["step"] for h in histories if len(h)]
    steps = np.unique(np.concatenate(every))[-last:] if every else np.zeros(0, np.int64)
    if every and len(every) == len(histories) and all(np.array_equal(taken[-last:], steps) for taken in every):
        shape = (len(histories), len(steps))
        return StepWindow(steps, joined([h[-last:] for h in histories]).reshape(shape), np.ones(shape, bool))
    records = np.zeros((len(histories), len(steps)), STEP_DTYPE)
    valid = np.zeros((len(histories), len(steps)), bool)
    for row, history in enumerate(histories):
        kept = history[np.isin(history["step"], steps)]
        columns = np.searchsorted(steps, kept["step"])
        records[row, columns] = kept  # a step done again after a resume: the later record wins
        valid[row, columns] = True
    return StepWindow(steps, records, valid)
