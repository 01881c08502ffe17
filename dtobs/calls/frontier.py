"""How far every rank came in a group: the last call it issued, and the first that it has not completed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

NOTHING_PENDING = np.iinfo(np.int64).max
UNKNOWN = -1


@dataclass(frozen=True)
class Frontier:
    """One group. Arrays are per member rank of which something was heard, in the order of `rows`.

    `rows`, `last_entry` and `pending_entry` are the source's own numbers: of ranks, of the last call and of the first
    that is not completed (−1 for none); a rank's later call has the larger one. `issued`: last sequence number, 0 when
    there was no call, UNKNOWN where nobody tells; `pending`: the first not completed, NOTHING_PENDING when there is
    none. `absent`: ranks of the group of which nothing was heard; `unknown`: how many more there are beyond those.
    """

    group: int
    rows: npt.NDArray[np.int64]
    issued: npt.NDArray[np.int64]
    pending: npt.NDArray[np.int64]
    last_entry: npt.NDArray[np.int64]
    pending_entry: npt.NDArray[np.int64]
    absent: npt.NDArray[np.int64]
    unknown: int

    @property
    def waits(self) -> bool:
        """Whether a rank has issued a call of this group that is not completed."""
        return bool((self.pending != NOTHING_PENDING).any())

    @property
    def seq(self) -> int:
        """The first call that a rank has issued and not completed."""
        return int(self.pending.min())

    def with_unknown(self, rows: Sequence[int]) -> Frontier:
        """The same with further ranks, of which nobody tells where they stand."""
        none, more = np.full(len(rows), -1, np.int64), np.array(rows, np.int64)
        return replace(
            self,
            rows=np.append(self.rows, more),
            issued=np.append(self.issued, np.full(len(rows), UNKNOWN)),
            pending=np.append(self.pending, np.full(len(rows), NOTHING_PENDING)),
            last_entry=np.append(self.last_entry, none),
            pending_entry=np.append(self.pending_entry, none),
        )
