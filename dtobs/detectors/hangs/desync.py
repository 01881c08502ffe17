"""Silent desynchronisation: a rank whose calls run ahead of its peers' or behind them, seen in lines and steps.

Pure comparison of what the rings hold; `disagree` says what it means.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dtobs.calls.order import RECENT, shifts
from dtobs.detectors.hangs.calls import Calls
from dtobs.detectors.hangs.mismatch import Mismatch

MIN_AGREED = 2
"""Calls before the first difference that have to be of the same step on both ranks."""
MIN_SHIFTED = 6
"""Calls after it that have to agree once they are shifted, over `MIN_STEPS` steps: fewer may be chance."""
MIN_STEPS = 3
_MAX_TRIES = 64
"""Differences of a group that are looked at: a branch by rank makes one in every step."""


@dataclass(frozen=True)
class Desync:
    """`rank` made `shift` calls more than `peer` (fewer below 0), first seen at `seq` of `group`."""

    group: int
    seq: int
    rank: int
    peer: int
    shift: int
    agreeing: int
    sure: bool  #: whether it is this rank that is odd, rather than its peer


def desyncs(calls: Calls, mismatches: Sequence[Mismatch]) -> list[Desync]:
    """The first one of each group. A few shifted calls are enough where a mismatch of the same rank stopped them."""
    found: dict[int, Desync] = {}
    for rows in _differing(calls):
        group = int(rows["group"][0])
        if group not in found and (one := _desync(calls, rows, mismatches)) is not None:
            found[group] = one
    return list(found.values())


def _differing(calls: Calls) -> Iterator[npt.NDArray[np.void]]:
    """Calls that met and came from different lines, but are of one kind; in order of group and number."""
    tries: Counter[int] = Counter()
    for part in calls.table.differing(calls.table.site):
        rows = calls.rows[part]
        group = int(rows["group"][0])
        if (rows["op"] == rows["op"][0]).all():
            tries[group] += 1
            if tries[group] <= _MAX_TRIES:
                yield rows


def _desync(calls: Calls, rows: npt.NDArray[np.void], mismatches: Sequence[Mismatch]) -> Desync | None:
    """Whether the odd one of the ranks that met here runs ahead of or behind its peers from here on."""
    group, seq = int(rows["group"][0]), int(rows["seq"][0])
    if set(rows["rank"].tolist()) != set(calls.members(group)) - calls.unreliable:
        return None
    if not all(_has_line(calls, row) for row in rows):
        return None
    sites = Counter(rows["site"].tolist())
    usual, count = sites.most_common(1)[0]
    odd = rows["rank"][rows["site"] != usual].tolist()
    peer = int(rows["rank"][rows["site"] == usual][0])
    if len(rows) == 2:
        return _of_two(calls, rows)
    if 2 * count <= len(rows) or len(odd) > 1:
        return None  # several ranks from lines of their own: that is how the program is written
    stopped = any(m.group == group and m.parties.odd == tuple(odd) and 0 <= m.seq - seq <= RECENT for m in mismatches)
    shift = _shift(calls, group, seq, odd[0], peer, least=1 if stopped else MIN_SHIFTED)
    return Desync(group, seq, odd[0], peer, *shift, sure=True) if shift is not None else None


def _of_two(calls: Calls, rows: npt.NDArray[np.void]) -> Desync | None:
    """Of two ranks the one is odd that calls from a line neither has called from before."""
    group, seq = int(rows["group"][0]), int(rows["seq"][0])
    earlier = calls.rows[(calls.rows["group"] == group) & (calls.rows["seq"] < seq)]["site"]
    new = [row for row in rows if not (earlier == row["site"]).any()]
    first, second = (int(r) for r in rows["rank"])
    if len(new) == 1 and int(new[0]["rank"]) == first:
        first, second = second, first
    shift = _shift(calls, group, seq, second, first)
    if shift is None:
        return None
    # A call too many is from a new line; a line that both know is one that the other rank has left out.
    return Desync(group, seq, second, first, *shift, sure=len(new) == 1 and shift[0] > 0)


def _shift(
    calls: Calls, group: int, seq: int, rank: int, peer: int, least: int = MIN_SHIFTED
) -> tuple[int, int] | None:
    """By how many calls `rank` is ahead of `peer` from `seq` on, and how many calls agree on it; None for no shift."""
    mine, theirs = (_sequence(calls, group, r) for r in (rank, peer))
    if mine is None or theirs is None:
        return None
    before = [ours[(ours["seq"] < seq) & (ours["seq"] >= seq - MIN_AGREED)] for ours in (mine, theirs)]
    if len(before[0]) < MIN_AGREED or not np.array_equal(before[0]["step"], before[1]["step"]):
        return None
    mine, theirs = mine[mine["seq"] >= seq], theirs[theirs["seq"] >= seq]
    for shift, length in shifts(mine[["site", "step", "op"]], theirs[["site", "step", "op"]]):
        steps = mine["step"][max(shift, 0) :][:length]
        if length >= least and (least == 1 or len(np.unique(steps)) >= MIN_STEPS):
            return shift, length
    return None


def _sequence(calls: Calls, group: int, rank: int) -> npt.NDArray[np.void] | None:
    """The calls of `rank` in `group`, in order; None where some are missing in between."""
    rows = calls.rows[(calls.rows["group"] == group) & (calls.rows["rank"] == rank)]
    seqs = rows["seq"].astype(np.int64)
    return rows if len(seqs) and (np.diff(seqs) == 1).all() else None


def _has_line(calls: Calls, row: np.void) -> bool:
    site = calls.site(int(row["rank"]), int(row["site"]))
    return site is not None and site.line > 0
