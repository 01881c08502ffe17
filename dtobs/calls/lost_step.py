"""Silent desynchronisation: a rank that made calls more or fewer than its peers, of the same kind and size.

Nothing raises: from there on the rank's n-th call meets its peers' other calls. It is seen in the lines of the calls
alone. A line that differs is no fault by itself (rank 0 may broadcast from a line of its own); a *sequence* of lines
that equals its peers', shifted by a few calls, is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dtobs.calls.agree import Disagreement
from dtobs.calls.order import RECENT, shifts
from dtobs.calls.table import CallTable

MIN_BEFORE = 2
"""Calls of both ranks before the first difference, in equal steps: who was right cannot be seen without them."""
MIN_SHIFTED = 6
"""Calls after it that have to agree once they are shifted: fewer may be chance."""
MIN_DIFFERING = 2
"""Of these the ones that do not agree unless they are shifted."""
MIN_STEPS, MIN_LINES = 3, 2
"""The steps that these calls are of; where the source does not tell steps, the lines: one line shows no order."""
_MAX_TRIES = 64
"""Differences that are looked at for each rank of a group: a branch by rank makes one in every step."""


@dataclass(frozen=True)
class LostStep:
    """`rank` made `shift` calls more than `peer` (fewer below 0), first seen at `seq` of `group`.

    `agreeing`: how many calls agree once they are shifted. `sure`: whether it is this rank that is odd, rather than
    its peer. `proved`: the shifted calls alone are proof; else only what went wrong soon after makes them one.
    """

    group: int
    seq: int
    rank: int
    peer: int
    shift: int
    agreeing: int
    sure: bool
    proved: bool

    def leads_to(self, mismatch: Disagreement) -> bool:
        """Whether a mismatch of the same rank comes so soon after its odd call that the call explains it."""
        return (
            mismatch.group == self.group
            and mismatch.parties.majority
            and self.rank in mismatch.parties.odd
            and self.seq <= mismatch.seq <= self.seq + RECENT
        )


@dataclass(frozen=True)
class Program:
    """The calls of all ranks with what tells a lost step, each source's own.

    `fits`: equal for calls of one kind and size; `steps`: of each call, None where nobody tells; `lines`: whether all
    of some rows have a line of the user's; `heard`: the ranks of a group that must have made a call for it to be
    compared; `size_of`: how many ranks a group has.
    """

    table: CallTable
    fits: npt.NDArray[Any]
    steps: npt.NDArray[Any] | None
    lines: Callable[[slice], bool]
    heard: Callable[[int], Collection[int]]
    size_of: Callable[[int], int]
    _places: dict[tuple[int, int], npt.NDArray[np.int64]] = field(default_factory=dict)

    def of_rank(self, group: int, rank: int) -> npt.NDArray[np.int64]:
        """The rows of a rank's calls in a group, in order; none where some are missing in between."""
        if (group, rank) not in self._places:
            low, high = np.searchsorted(self.table.group, [group, group + 1])
            rows = low + np.flatnonzero(self.table.rank[low:high] == rank)
            complete = (np.diff(self.table.seq[rows].astype(np.int64)) == 1).all()
            self._places[group, rank] = rows if complete else rows[:0]
        return self._places[group, rank]

    def ways(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """What tells calls apart: int64[calls, 2 or 3], of each its line, its kind and, where known, its step."""
        columns = (self.table.site, self.fits, *(() if self.steps is None else (self.steps,)))
        return np.stack([column[rows].astype(np.int64) for column in columns], axis=1)


def lost_steps(program: Program) -> list[LostStep]:
    """Every rank whose lines run ahead of or behind its peers': of each group up to the first one that is proved."""
    table, heard = program.table, cache(lambda group: frozenset(program.heard(group)))
    found: list[LostStep] = []
    proved: set[int] = set()
    looks: Counter[int] = Counter()
    tries: Counter[tuple[int, int]] = Counter()
    for rows in table.differing(table.site):
        group = int(table.group[rows.start])
        if group in proved or looks[group] >= _MAX_TRIES * (rows.stop - rows.start):
            continue
        looks[group] += 1
        ranks, fits = table.rank[rows].tolist(), program.fits[rows]
        if (fits != fits[0]).any() or not program.lines(rows) or set(ranks) != heard(group):
            continue
        parties = _two(program, rows) if len(ranks) == 2 else _one_among_many(program, rows)
        if parties is None:
            continue
        rank, peer, sure = parties
        tries[group, rank] += 1
        one = _shifted(program, rows, rank, peer, sure=sure) if tries[group, rank] <= _MAX_TRIES else None
        if one is not None:
            found.append(one)
            proved |= {group} if one.proved else set()
    return found


def believed(candidates: Iterable[LostStep], mismatches: Collection[Disagreement]) -> list[LostStep]:
    """The first of each group that is proved, or that a mismatch of the same rank followed."""
    found: dict[int, LostStep] = {}
    for one in candidates:
        if one.proved or any(one.leads_to(mismatch) for mismatch in mismatches):
            found.setdefault(one.group, one)
    return list(found.values())


def _one_among_many(program: Program, rows: slice) -> tuple[int, int, bool] | None:
    """The rank that is alone with its line, one of its peers, and whether these are most of the group."""
    table = program.table
    ranks, sites = table.rank[rows], table.site[rows]
    values, counts = np.unique(sites, return_counts=True)
    usual, most = values[counts.argmax()], int(counts.max())
    odd = ranks[sites != usual].tolist()
    if len(odd) > 1 or most < 2:
        return None  # several ranks from lines of their own: that is how the program is written
    return odd[0], int(ranks[sites == usual][0]), 2 * most > program.size_of(int(table.group[rows.start]))


def _two(program: Program, rows: slice) -> tuple[int, int, bool] | None:
    """Of two ranks the one is odd that calls from a line neither has called from before; else the second, perhaps."""
    table = program.table
    first, second = table.rank[rows].tolist()
    low = int(np.searchsorted(table.group, table.group[rows.start]))
    new = [not (table.site[low : rows.start] == site).any() for site in table.site[rows].tolist()]
    if new == [True, False]:
        first, second = second, first
    return second, first, sum(new) == 1 and program.size_of(int(table.group[rows.start])) == 2


def _shifted(program: Program, rows: slice, rank: int, peer: int, *, sure: bool) -> LostStep | None:
    """By how many calls `rank` is ahead of `peer` from here on; None for no shift."""
    table = program.table
    group, seq = int(table.group[rows.start]), int(table.seq[rows.start])
    mine, theirs = program.of_rank(group, rank), program.of_rank(group, peer)
    ours, others = (int(np.searchsorted(table.seq[places], seq)) for places in (mine, theirs))
    if min(ours, others) < MIN_BEFORE:
        return None
    before = (mine[ours - MIN_BEFORE : ours], theirs[others - MIN_BEFORE : others])
    if program.steps is not None and (program.steps[before[0]] != program.steps[before[1]]).any():
        return None
    mine, theirs = mine[ours:], theirs[others:]
    calls, wanted = program.ways(mine), program.ways(theirs)
    length = min(len(calls), len(wanted))
    differing = int((calls[:length] != wanted[:length]).any(axis=1).sum())
    candidates = list(shifts(calls, wanted))
    two = len(table.rank[rows]) == 2
    for shift, agreeing in candidates:
        shown = mine[max(shift, 0) :][:agreeing]
        if agreeing >= MIN_SHIFTED and differing >= MIN_DIFFERING and _has_order(program, shown):
            # Of two ranks a call too many is from a new line; a line that both know may be one that the peer left out.
            return LostStep(group, seq, rank, peer, shift, agreeing, sure and not (two and shift < 0), proved=True)
    if not candidates or int((calls == calls[0]).all(axis=1).sum()) > 1:
        return None  # no shift, or a line of the rank's own that it often calls from
    return LostStep(group, seq, rank, peer, *candidates[0], sure and not two, proved=False)


def _has_order(program: Program, rows: npt.NDArray[np.int64]) -> bool:
    """Whether calls are of so many steps, or from so many lines, that their order is none by chance."""
    if program.steps is not None:
        return len(np.unique(program.steps[rows])) >= MIN_STEPS
    return len(np.unique(program.table.site[rows])) >= MIN_LINES
