"""Sends and receives that did not complete, and whether the other side ever issued its half."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dtobs.calls.waits import PendingPair
from dtobs.flight_recorder.columns import COMPLETED, MAX_SEQ, SCHEDULED, STARTED
from dtobs.flight_recorder.model import Dumps
from dtobs.flight_recorder.operations import EntryKind


def pending_pairs(dumps: Dumps) -> list[PendingPair]:
    """Every send and receive that is not completed, but those whose other half is. Pure.

    The halves of a batch complete together, so that one is open though its transfer is done. Halves are paired by their
    order between two ranks, from the beginning where both rings hold it, else among those not completed.
    """
    entries = dumps.entries
    halves = np.flatnonzero((entries["kind"] == EntryKind.SEND) | (entries["kind"] == EntryKind.RECV))
    if not len(halves):
        return []
    is_open = (entries["state"][halves] == SCHEDULED) | (entries["state"][halves] == STARTED)
    ranks = dumps.rank_numbers
    channels = _channels(entries, halves)
    order = np.argsort(channels, kind="stable")
    halves, sorted_channels = halves[order], channels[order]
    result = []
    for channel in np.unique(channels[is_open]):
        inside = halves[slice(*np.searchsorted(sorted_channels, [channel, channel + 1]))]
        first = entries[inside[0]]
        group, source, target = int(first["group"]), int(first["source"]), int(first["target"])
        pair = (dumps.rank_at(group, source), dumps.rank_at(group, target))
        sends = inside[(entries["kind"][inside] == EntryKind.SEND) & (ranks[dumps.row[inside]] == pair[0])]
        recvs = inside[(entries["kind"][inside] == EntryKind.RECV) & (ranks[dumps.row[inside]] == pair[1])]
        result += _pair(dumps, sends, recvs, pair)
    return result


def _channels(entries: npt.NDArray[np.void], halves: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """i64[halves]: one number for each (group, source, target)."""
    group, source, target = (entries[name][halves].astype(np.int64) for name in ("group", "source", "target"))
    width = int(max(source.max(), target.max())) + 1
    return np.asarray((group * width + source) * width + target)


def _pair(
    dumps: Dumps, sends: npt.NDArray[np.int64], recvs: npt.NDArray[np.int64], pair: tuple[int, int]
) -> list[PendingPair]:
    rows = {dump.rank: row for row, dump in enumerate(dumps.ranks) if dump.rank in pair}
    whole = all(dumps.ranks[row].whole for row in rows.values())
    done_sends, done_recvs = _done(dumps, sends, recvs, whole)
    open_sends, open_recvs = _open(dumps, sends, done_sends), _open(dumps, recvs, done_recvs)
    all_sends, all_recvs = list(map(int, sends)), list(map(int, recvs))
    result = []
    for mine, theirs, own, other, me, peer in (
        (open_sends, open_recvs, all_sends, all_recvs, pair[0], pair[1]),
        (open_recvs, open_sends, all_recvs, all_sends, pair[1], pair[0]),
    ):
        for order, entry in enumerate(mine):
            at = own.index(entry) if whole else order
            candidates = other if whole else theirs
            partner = candidates[at] if at < len(candidates) else -1
            misfit = partner >= 0 and _elements(dumps, entry) != _elements(dumps, partner)
            result.append(PendingPair(entry, rows[me], peer, rows.get(peer, -1), partner, misfit))
    return result


def _open(dumps: Dumps, halves: npt.NDArray[np.int64], done: npt.NDArray[np.int64]) -> list[int]:
    state = dumps.entries["state"][halves]
    is_open = (state == SCHEDULED) | (state == STARTED)
    return [int(i) for i in halves[is_open & ~np.isin(halves, done)]]


def _done(
    dumps: Dumps, sends: npt.NDArray[np.int64], recvs: npt.NDArray[np.int64], whole: bool
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The sends and the receives whose other half is completed.

    Both are counted from the beginning, or from the last collective that both ranks have completed.
    """
    if len(sends) and len(recvs) and not whole:
        after_send, after_recv = _last_in_common(dumps, int(dumps.row[sends[0]]), int(dumps.row[recvs[0]]))
        sends, recvs = sends[sends > after_send], recvs[recvs > after_recv]
    both = min(len(sends), len(recvs))
    sends, recvs = sends[:both], recvs[:both]
    state = dumps.entries["state"]
    return sends[state[recvs] == COMPLETED], recvs[state[sends] == COMPLETED]


def _last_in_common(dumps: Dumps, row: int, other: int) -> tuple[int, int]:
    """Two ranks' entries of the last collective that both have completed; past all entries when there is none."""
    keys, places = [], []
    for low, high in (dumps.bounds[row : row + 2], dumps.bounds[other : other + 2]):
        part = dumps.entries[low:high]
        chosen = np.flatnonzero((part["kind"] == EntryKind.COLLECTIVE) & (part["state"] == COMPLETED))[::-1]
        keys.append(part["group"][chosen].astype(np.int64) * (MAX_SEQ + 1) + part["seq"][chosen])
        places.append(low + chosen)
    shared, mine, theirs = np.intersect1d(*keys, return_indices=True)
    if not len(shared):
        return len(dumps.entries), len(dumps.entries)
    last = np.argmax(places[0][mine])
    return int(places[0][mine[last]]), int(places[1][theirs[last]])


def _elements(dumps: Dumps, entry: int) -> int:
    return max(dumps.operations[int(dumps.entries["signature"][entry])].elements)
