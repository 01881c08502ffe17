"""Which entries of different ranks belong together: rows ordered by (group, sequence number, part, rank).

Older PyTorch lets a batch of sends and receives use up a collective sequence number on the ranks that take part in it,
so that the numbers of one group drift apart on healthy ranks. Such groups are counted anew where every ring still
holds the beginning, and left alone, with a note, where one does not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dtobs.calls.table import CallTable, begins
from dtobs.flight_recorder.model import Dumps
from dtobs.flight_recorder.operations import EntryKind


@dataclass(frozen=True)
class Aligned(CallTable):
    """Collective entries of all ranks; the parts of a coalesced call are calls of their own.

    `entry`: i64[n], index into `dumps.entries`; `row`: i32[n], the rank's. `by_rank`: i64[n], the same entries by
    (group, row, record).
    """

    entry: npt.NDArray[np.int64]
    row: npt.NDArray[np.int32]
    by_rank: npt.NDArray[np.int64]
    notes: tuple[str, ...] = ()


def align(dumps: Dumps) -> Aligned:
    """Order the collectives of `dumps`. Pure."""
    entries = dumps.entries
    chosen = np.flatnonzero(entries["kind"] == EntryKind.COLLECTIVE)
    group, row = entries["group"][chosen], dumps.row[chosen]
    seq = entries["seq"][chosen]
    by_rank = np.argsort(group.astype(np.int64) * max(len(dumps.ranks), 1) + row, kind="stable")
    notes = []
    for odd in _drifting(dumps, chosen):
        if all(dump.whole for dump in dumps.ranks):
            _count_anew(seq, group, row, by_rank, odd)
            continue
        notes.append(
            f"group {dumps.groups[odd].label} mixes batched sends and collectives, whose numbers this PyTorch lets"
            " drift apart, and the rings no longer hold the beginning: its collectives are not compared"
        )
        keep = group != odd
        position = np.cumsum(keep) - 1
        by_rank = position[by_rank[keep[by_rank]]]
        chosen, group, row, seq = chosen[keep], group[keep], row[keep], seq[keep]
    order = np.lexsort((entries["sub"][chosen], seq, group))
    back = np.empty(len(order), np.int64)
    back[order] = np.arange(len(order))
    chosen, group, seq, row = chosen[order], group[order], seq[order], row[order]
    return Aligned(
        group,
        seq,
        dumps.rank_numbers[row],
        entries["signature"][chosen],
        entries["site"][chosen],
        begins(group, seq, entries["sub"][chosen]),
        chosen,
        row,
        back[by_rank],
        tuple(notes),
    )


def _drifting(dumps: Dumps, chosen: npt.NDArray[np.int64]) -> list[int]:
    """Groups where sends and receives used up collective sequence numbers."""
    entries = dumps.entries
    p2p = np.flatnonzero(entries["kind"] != EntryKind.COLLECTIVE)
    uses = len(dumps.groups)
    both = np.bincount(entries["group"][p2p], minlength=uses) * np.bincount(entries["group"][chosen], minlength=uses)
    mixed = np.flatnonzero(both)
    found = []
    for group in mixed:
        mine = chosen[entries["group"][chosen] == group]
        theirs = p2p[entries["group"][p2p] == group]
        width = np.int64(max(int(entries["seq"][mine].max()), int(entries["seq"][theirs].max())) + 1)
        held = dumps.row[mine] * width + entries["seq"][mine]
        first = np.full(len(dumps.ranks), np.iinfo(np.int64).max)
        np.minimum.at(first, dumps.row[mine], entries["seq"][mine])
        used = theirs[entries["seq"][theirs] > first[dumps.row[theirs]]]
        if not np.isin(dumps.row[used] * width + entries["seq"][used], held).all():
            found.append(int(group))
    return found


def _count_anew(
    seq: npt.NDArray[np.int64],
    group: npt.NDArray[np.int32],
    row: npt.NDArray[np.int32],
    by_rank: npt.NDArray[np.int64],
    odd: int,
) -> None:
    mine = by_rank[group[by_rank] == odd]
    new_rank = np.ones(len(mine), bool)
    new_rank[1:] = row[mine[1:]] != row[mine[:-1]]
    new_call = new_rank.copy()
    new_call[1:] |= seq[mine[1:]] != seq[mine[:-1]]
    count = np.cumsum(new_call)
    first = count[new_rank][np.cumsum(new_rank) - 1]
    seq[mine] = count - first + 1
