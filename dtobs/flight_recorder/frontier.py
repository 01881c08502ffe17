"""The frontiers of a job from its dumps: how far every rank came in every group."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dtobs.calls.frontier import NOTHING_PENDING, Frontier
from dtobs.flight_recorder.align import Aligned
from dtobs.flight_recorder.columns import COMPLETED, ISSUED, SCHEDULED, STARTED
from dtobs.flight_recorder.model import Dumps


def frontiers(dumps: Dumps, aligned: Aligned) -> dict[int, Frontier]:
    """The frontier of every group that was used, by group. Pure."""
    order = aligned.by_rank
    if not len(order):
        return {}
    group, row = aligned.group[order], aligned.row[order]
    seq, entry = aligned.seq[order], aligned.entry[order]
    new = np.ones(len(order), bool)
    new[1:] = (group[1:] != group[:-1]) | (row[1:] != row[:-1])
    start = np.flatnonzero(new)
    state = dumps.entries["state"][entry]
    is_open = (state == SCHEDULED) | (state == STARTED)
    is_open &= ~_late_to_say(dumps, group, seq, entry)
    open_seq = np.where(is_open, seq, NOTHING_PENDING)
    pending = np.minimum.reduceat(open_seq, start)
    last = np.append(start[1:], len(order)) - 1
    pair_of = np.cumsum(new) - 1
    pending_entry = np.full(len(start), -1, np.int64)
    at = np.flatnonzero((open_seq == pending[pair_of]) & (open_seq != NOTHING_PENDING))[::-1]
    pending_entry[pair_of[at]] = entry[at]  # reversed: of the parts of one call, the first wins
    pair_group = group[start]
    bounds = np.append(np.flatnonzero(np.append(True, pair_group[1:] != pair_group[:-1])), len(start))
    row_of = np.full(dumps.world_size + 1, -1, np.int64)
    row_of[dumps.rank_numbers] = np.arange(len(dumps.ranks))
    partial = np.array([dump.partial for dump in dumps.ranks])
    wrapped = np.array([not dump.whole for dump in dumps.ranks])
    result = {}
    for begin, end in pairwise(bounds):
        index = int(pair_group[begin])
        info = dumps.groups[index]
        rows = row[start[begin:end]].astype(np.int64)
        member_rows = row_of[info.members]
        silent = np.setdiff1d(member_rows[member_rows >= 0], rows)
        absent = info.members[member_rows < 0].astype(np.int64)
        if partial.any():  # of a rank whose other recorder is missing nobody knows what it called
            absent = np.append(absent, dumps.rank_numbers[silent[partial[silent]]])
            silent = silent[~partial[silent]]
        pad = len(silent)
        # Nobody waits in a group of one: of a group whose ranks are those that were seen, another dump is missing.
        more = int(info.inferred and len(info.members) == 1 and bool(dumps.missing_ranks))
        waits = pending[begin:end]
        # A ring that begins with calls that are not completed has lost others of which nobody knows whether they were.
        lost = wrapped[rows] & (waits == seq[start[begin:end]])
        waits = np.where(lost, waits.min(), waits)
        result[index] = Frontier(
            group=index,
            rows=np.concatenate([rows, silent]),
            issued=np.append(seq[last[begin:end]], np.zeros(pad, np.int64)),
            pending=np.append(waits, np.full(pad, NOTHING_PENDING)),
            last_entry=np.append(entry[last[begin:end]], np.full(pad, -1)),
            pending_entry=np.append(pending_entry[begin:end], np.full(pad, -1)),
            absent=absent,
            unknown=max(more, info.size - len(info.members)),
        )
    return result


def told_by_peers(dumps: Dumps, aligned: Aligned) -> Dumps:
    """The dumps, where calls that are only known to be issued wait if a member of their group never came so far.

    Whether the others have ended nobody knows.
    """
    entries = dumps.entries.copy()
    together = np.array([op.synchronising for op in dumps.operations] or [False])[entries["signature"][aligned.entry]]
    issued = together & (entries["state"][aligned.entry] == ISSUED)
    row_of = {rank: row for row, rank in enumerate(dumps.rank_numbers.tolist())}
    for group in np.unique(aligned.group[issued]).tolist():
        inside = slice(*np.searchsorted(aligned.group, [group, group + 1]).tolist())
        reached = np.zeros(len(dumps.ranks), np.int64)
        np.maximum.at(reached, aligned.row[inside], aligned.seq[inside])
        members = [row_of[rank] for rank in dumps.groups[group].members.tolist() if rank in row_of]
        waits = issued[inside] & (aligned.seq[inside] > reached[members].min())
        entries["state"][aligned.entry[inside][waits]] = SCHEDULED
    return replace(dumps, entries=entries)


def _late_to_say(
    dumps: Dumps,
    group: npt.NDArray[np.int32],
    seq: npt.NDArray[np.int64],
    entry: npt.NDArray[np.int64],
) -> npt.NDArray[np.bool_]:
    """bool[entries]: calls of Gloo that a peer has completed, which this rank's recorder has yet to note.

    Gloo has no device that could lag behind: what one rank completed, all have taken part in.
    """
    gloo = dumps.entries["on_host"][entry] > 0
    if not gloo.any():
        return np.zeros(len(entry), bool)
    together = np.array([op.synchronising for op in dumps.operations])[dumps.entries["signature"][entry]]
    done = gloo & together & (dumps.entries["state"][entry] == COMPLETED)
    reached = np.zeros(len(dumps.groups), np.int64)
    np.maximum.at(reached, group[done], seq[done])
    return np.asarray(gloo & (seq <= reached[group]))
