"""How far every rank came in a group: the last call it issued, and the first that it has not completed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

NOTHING_PENDING = np.iinfo(np.int64).max
UNKNOWN = -1
_MAX_GROUPS = 1 << 20


@dataclass(frozen=True)
class Frontier:
    """How far each rank has come in one process group.

    Arrays are per member rank of which something was heard, in the order of `rows`.

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


def frontier_of(
    group: int, issued: Mapping[int, int], waits_in: Mapping[int, int], absent: Sequence[int] = ()
) -> Frontier:
    """The frontier of a group from a source that tells no single calls.

    `issued`: the last sequence number of each rank, UNKNOWN where nobody tells; `waits_in`: of ranks that wait the call
    they wait in.
    """
    ranks = np.array(sorted(issued), np.int64)
    pending = np.array([waits_in.get(rank, NOTHING_PENDING) for rank in ranks.tolist()], np.int64)
    return Frontier(
        group=group,
        rows=ranks,
        issued=np.array([issued[rank] for rank in ranks.tolist()], np.int64),
        pending=pending,
        last_entry=np.full(len(ranks), -1),
        pending_entry=np.where(pending == NOTHING_PENDING, -1, ranks * _MAX_GROUPS + group),
        absent=np.array(absent, np.int64),
        unknown=0,
    )


def without_waits(state: Frontier, stale: Collection[int]) -> Frontier:
    """The frontier, in which `stale` rows wait in nothing: what they waited in has long been completed with them."""
    old = np.isin(state.rows, list(stale))
    return replace(
        state,
        pending=np.where(old, NOTHING_PENDING, state.pending),
        pending_entry=np.where(old, -1, state.pending_entry),
    )
