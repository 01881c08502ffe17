"""Silent desynchronisation: a rank that made one call more or fewer than its peers, of the same shape.

Nothing raises: from there on the rank's n-th call meets its peers' other calls. It is seen in the call sites alone. A
call site that differs is no fault by itself (rank 0 may broadcast from a line of its own); a *sequence* of call
sites that equals its peers' shifted by a few is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dtobs.calls.order import shifts
from dtobs.flight_recorder.align import Aligned
from dtobs.flight_recorder.model import Dumps

MIN_CALLS = 4
"""Calls that have to agree after the shift: fewer could be chance."""
MIN_DIFFERING = 2


@dataclass(frozen=True)
class Desync:
    """Rank `row` made `shift` calls more (or, below 0, fewer) than its peers in `group`, first seen at `seq`.

    `entry` is the rank's call there, `expected_site` what its peers called from; `majority`: whether most ranks of
    the group agree on that. `proved`: the shifted sequence alone is proof; else only a mismatch or a deadlock soon
    after makes it one.
    """

    group: int
    row: int
    seq: int
    shift: int
    entry: int
    expected_site: int
    agreeing: int
    majority: bool
    proved: bool


def find_desyncs(dumps: Dumps, aligned: Aligned) -> list[Desync]:
    """Every rank whose call sites run ahead of or behind its peers', proved or not. Pure."""
    if not len(aligned.entry):
        return []
    site = aligned.site
    low = np.minimum.reduceat(site, aligned.start)
    high = np.maximum.reduceat(site, aligned.start)
    suspicious = np.unique(aligned.group[aligned.start[(low != high) & (low >= 0)]])
    if not len(suspicious):
        return []
    usual = aligned.usual(site)
    lengths = np.diff(np.append(aligned.start, len(aligned.entry)))
    differs = (site != np.repeat(usual, lengths)) & np.isin(aligned.group, suspicious)
    segment_of = np.repeat(np.arange(len(aligned.start)), lengths)
    found = []
    for group in suspicious:
        inside = aligned.group == group
        for row in np.unique(aligned.row[inside & differs]):
            mine = np.flatnonzero(inside & (aligned.row == row))
            desync = _shift(dumps, aligned, mine, site[mine], usual, segment_of[mine])
            if desync is not None:
                found.append(desync)
    return found


def _shift(
    dumps: Dumps,
    aligned: Aligned,
    mine: npt.NDArray[np.int64],
    site: npt.NDArray[np.int32],
    usual: npt.NDArray[np.int32],
    segments: npt.NDArray[np.int64],
) -> Desync | None:
    """Compare one rank's sites with its peers' from the first difference on."""
    expected = usual[segments]
    first = int(np.flatnonzero(site != expected)[0])
    seqs = aligned.seq[mine]
    if not np.array_equal(seqs, np.arange(seqs[0], seqs[0] + len(seqs))):
        return None  # holes or coalesced calls: positions cannot be compared
    tail, wanted = site[first:], expected[first:]
    for shift, agreeing in shifts(tail, wanted):
        ours = tail[max(shift, 0) :][:agreeing]
        proved = agreeing >= MIN_CALLS and int((tail != wanted).sum()) >= MIN_DIFFERING
        if len(np.unique(ours)) < 2 and agreeing < 2 * MIN_CALLS:
            proved = False  # one line only, a few times: no order to recognise
        if not proved and int((site == tail[0]).sum()) > 1:
            return None  # a line of the rank's own that it often calls from
        group = int(aligned.group[mine[0]])
        position = int(mine[first])
        segment = int(segments[first])
        start, end = int(aligned.start[segment]), int(aligned.end[segment])
        peers = aligned.site[start:end] == wanted[0]
        return Desync(
            group=group,
            row=int(aligned.row[position]),
            seq=int(seqs[first]),
            shift=shift,
            entry=int(aligned.entry[position]),
            expected_site=int(wanted[0]),
            agreeing=agreeing,
            majority=2 * int(peers.sum()) > dumps.groups[group].size,
            proved=proved,
        )
    return None
