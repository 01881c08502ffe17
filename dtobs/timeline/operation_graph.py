"""What would the job have taken with other durations: its operations simulated over what each depends on.

As in "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI'25): a rank computes one thing
after the other, and each kind of communication has a stream of its own. A forward needs its input received, a send what
was computed, the parameters' gathering comes before and the gradients' reduction after. A message or a collective
begins when the last of its members is there; what it takes from then on is its transfer, the rest of its recorded
duration was waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dtobs.errors import TargetError
from dtobs.timeline.operations import COMPUTATION, MESSAGES, OPS, SYNCS, Floats, Ints, Operations

_AT_ONCE = 48
"""Scenarios simulated together: bounds the memory."""


@dataclass
class Graph:
    """What each operation waits for, in the order in which all can be simulated."""

    duration: Floats  #: of computations as recorded, of communication its transfer
    needs: Ints  #: [operations, k], -1 for none
    levels: list[tuple[Ints, Ints]]  #: operations, and where each of their groups begins among them

    def times(self, durations: npt.NDArray[np.float64]) -> Floats:
        """How long the job takes with each of the columns of float64[operations, scenarios]."""
        count, scenarios = durations.shape
        finish = np.zeros((count + 1, scenarios))  # the last row is "nothing to wait for"
        for rows, firsts in self.levels:
            ready = finish[self.needs[rows]].max(axis=1)
            if len(firsts) < len(rows):
                sizes = np.diff(np.append(firsts, len(rows)))
                ready = np.repeat(np.maximum.reduceat(ready, firsts, axis=0), sizes, axis=0)
            finish[rows] = ready + durations[rows]
        total: Floats = finish.max(axis=0)
        return total

    def scenarios(self, ideal: Floats, keep: Sequence[npt.NDArray[np.bool_]]) -> Floats:
        """The job's time where only the operations of each mask keep their durations and the others are ideal."""
        found = []
        for first in range(0, len(keep), _AT_ONCE):
            masks = np.stack(keep[first : first + _AT_ONCE], axis=1)
            found.append(self.times(np.where(masks, self.duration[:, None], ideal[:, None])))
        return np.concatenate(found)


def graph(ops: Operations) -> Graph:
    """Build the graph. Raises TargetError when operations wait for each other in a circle."""
    lane = _lanes(ops)
    groups = _groups(ops, lane)
    needs = np.stack([_stream(ops), *_inputs(ops, lane)], axis=1)
    return Graph(_transfers(ops, groups, needs), needs, _levels(needs, groups))


def _lanes(ops: Operations) -> Ints:
    """Which pipeline a rank belongs to: its data rank, and which of those that share data rank and stage it is."""
    ranks, first = np.unique(ops.rank, return_index=True)
    seen: dict[tuple[int, int], int] = {}
    lanes = np.zeros(len(ranks), dtype=np.int64)
    data_ranks = int(ops.dp.max()) + 1
    for number, row in enumerate(first.tolist()):
        cell = (int(ops.dp[row]), int(ops.pp[row]))
        place = seen.get(cell, 0)
        seen[cell] = place + 1
        lanes[number] = place * data_ranks + cell[0]
    found: Ints = lanes[np.searchsorted(ranks, ops.rank)]
    return found


def _key(*columns: Ints) -> Ints:
    """One number for each different row of the columns; equal rows have equal numbers."""
    _, key = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    return key.reshape(-1)


def _stream(ops: Operations) -> Ints:
    """What each operation's own stream did before it, -1 for the first."""
    stream = np.where(ops.is_op(*COMPUTATION), -1, np.where(ops.is_op(*SYNCS), -2, ops.op))
    order = np.lexsort((ops.microbatch, ops.start, ops.step, stream, ops.rank))
    same = (ops.rank[order][1:] == ops.rank[order][:-1]) & (stream[order][1:] == stream[order][:-1])
    found = np.full(len(ops), -1)
    found[order[1:][same]] = order[:-1][same]
    return found


class _Index:
    """Finds the row of an operation by lane, step, stage and micro-batch."""

    def __init__(self, ops: Operations, lane: Ints) -> None:
        self.ops, self.lane = ops, lane
        self.base = (int(ops.stage.max()) + 3, int(ops.microbatch.max()) + 3, int(lane.max()) + 1)

    def key(self, rows: Ints, shift: int = 0) -> Ints:
        stages, batches, lanes = self.base
        stage = self.ops.stage[rows] + shift + 1
        key = (self.ops.step[rows] * lanes + self.lane[rows]) * stages + stage
        found: Ints = key * batches + self.ops.microbatch[rows] + 1
        return found

    def find(self, rows: Ints, shift: int, *names: str) -> Ints:
        """For each of `rows` the operation of one of these names, `shift` stages further; of several the last."""
        known = np.flatnonzero(self.ops.is_op(*names))
        if not len(known):
            return np.full(len(rows), -1)
        known = known[np.lexsort((self.ops.start[known], self.key(known)))]
        keys, wanted = self.key(known), self.key(rows, shift)
        at = np.searchsorted(keys, wanted, side="right") - 1
        hit = (at >= 0) & (keys[np.maximum(at, 0)] == wanted)
        return np.where(hit, known[np.maximum(at, 0)], -1)


def _inputs(ops: Operations, lane: Ints) -> tuple[Ints, Ints]:
    """What each operation needs from other streams and ranks: its input, and the parameters or gradients."""
    index, count = _Index(ops, lane), len(ops)
    data, sync = np.full(count, -1), np.full(count, -1)

    def rows(*names: str) -> Ints:
        return np.flatnonzero(ops.is_op(*names))

    for compute, receive, send, step in (
        ("forward-compute", "forward-recv", "forward-send", -1),
        ("backward-compute", "backward-recv", "backward-send", 1),
    ):
        mine = rows(compute)
        found = index.find(mine, 0, receive)
        for name in (send, compute):  # where nobody recorded the receive
            missing = found < 0
            found[missing] = index.find(mine[missing], step, name)
        data[mine] = found
        receives = rows(receive)  # waits for what its sender computed, where nobody recorded the send
        unsent = receives[index.find(receives, step, send) < 0]
        data[unsent] = index.find(unsent, step, compute)
        sends = rows(send)
        data[sends] = index.find(sends, 0, compute)
    by_place = _key(ops.step, ops.rank, ops.stage)
    by_rank = _key(ops.step, ops.rank)
    forward, grads, backward = rows("forward-compute"), rows("grads-sync"), rows("backward-compute", "weight-gradient")
    gathered = _latest(ops, by_place, forward, rows("params-sync"), ends=False)
    # Where nothing gathers parameters, the step before must have reduced its gradients.
    sync[forward] = np.where(gathered < 0, _latest(ops, ops.rank, forward, grads, ends=True), gathered)
    sync[grads] = _latest(ops, by_place, grads, backward, ends=True)
    after = rows("optimizer", "clip")
    sync[after] = _latest(ops, by_rank, after, grads, ends=False)
    params = rows("params-sync")
    data[params] = _latest(ops, by_rank, params, rows("optimizer"), ends=True)
    return data, sync


def _latest(ops: Operations, place: Ints, rows: Ints, among: Ints, *, ends: bool) -> Ints:
    """For each of `rows` the last of `among` at its place that began (or ended) by the time that it began; else -1."""
    found = np.full(len(rows), -1)
    if not len(rows) or not len(among):
        return found
    moment = ops.start[among] + (ops.duration[among] * 0.99 if ends else 0.0)
    order = np.lexsort((moment, place[among]))
    among, moment = among[order], moment[order]
    first = np.searchsorted(place[among], place[rows], side="left")
    last = np.searchsorted(place[among], place[rows], side="right")
    for number, (row, low, high) in enumerate(zip(rows.tolist(), first.tolist(), last.tolist(), strict=True)):
        at = low + int(np.searchsorted(moment[low:high], ops.start[row], side="right")) - 1
        if at >= low:
            found[number] = among[at]
    return found


def _groups(ops: Operations, lane: Ints) -> Ints:
    """The members of one message or collective have one number; everything else has one of its own."""
    groups = np.arange(len(ops))
    index = _Index(ops, lane)
    for send, receive, step in (("forward-send", "forward-recv", 1), ("backward-send", "backward-recv", -1)):
        mine = np.flatnonzero(ops.is_op(send))
        other = index.find(mine, step, receive)
        _, once = np.unique(other, return_index=True)
        once = once[other[once] >= 0]
        groups[other[once]] = mine[once]
    mine = np.flatnonzero(ops.is_op(*SYNCS))
    if len(mine):
        size = int(ops.dp.max()) + 1
        place = (ops.step[mine], ops.stage[mine], ops.microbatch[mine], ops.op[mine], lane[mine] // size)
        order = np.lexsort((ops.start[mine], ops.rank[mine], _key(*place)))
        key = _key(*place, ops.rank[mine])[order]
        new = np.append(True, key[1:] != key[:-1])
        nth = np.arange(len(mine)) - np.maximum.accumulate(np.where(new, np.arange(len(mine)), 0))
        occurrence = np.empty(len(mine), dtype=np.int64)
        occurrence[order] = nth
        whole = _key(*place, occurrence)
        first = np.full(int(whole.max()) + 1, len(ops))
        np.minimum.at(first, whole, mine)
        groups[mine] = first[whole]
    return groups


def _transfers(ops: Operations, groups: Ints, needs: Ints) -> Floats:
    """Durations without the wait for the last member of a message or collective.

    A receive without its send waited until what it carries was computed.
    """
    last = np.full(len(ops), -np.inf)
    np.maximum.at(last, groups, ops.start)
    end = ops.start + ops.duration
    carried = np.flatnonzero(ops.is_op("forward-recv", "backward-recv") & (needs[:, 1] >= 0))
    np.maximum.at(last, groups[carried], end[needs[carried, 1]])
    waiting = ops.is_op(*MESSAGES, *SYNCS)
    found: Floats = np.where(waiting, np.clip(end - last[groups], 0.0, ops.duration), ops.duration)
    return found


def _levels(needs: Ints, groups: Ints) -> list[tuple[Ints, Ints]]:
    """Operations in rounds: a group is in the first round in which all that any member needs is done."""
    count = len(groups)
    rows, columns = np.nonzero(needs >= 0)
    before, after = groups[needs[rows, columns]], groups[rows]
    inner = before != after
    before, after = before[inner], after[inner]
    waiting = np.bincount(after, minlength=count)
    order = np.argsort(before, kind="stable")
    followers, edges = after[order], np.concatenate([[0], np.cumsum(np.bincount(before, minlength=count))])
    members = np.argsort(groups, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(groups, minlength=count))])
    heads = np.unique(groups)
    front = heads[waiting[heads] == 0]
    levels, done = [], 0
    while len(front):
        sizes = starts[front + 1] - starts[front]
        rows = members[_ranges(starts[front], sizes)]
        levels.append((rows, np.concatenate([[0], np.cumsum(sizes)[:-1]])))
        done += len(rows)
        freed = followers[_ranges(edges[front], edges[front + 1] - edges[front])]
        touched, times = np.unique(freed, return_counts=True)
        waiting[touched] -= times
        front = touched[waiting[touched] == 0]
    if done < count:
        raise TargetError("the table's operations wait for each other in a circle: its order cannot have happened")
    return levels


def _ranges(first: Ints, sizes: Ints) -> Ints:
    """first[0], first[0]+1, … of each range, one after the other."""
    total = int(sizes.sum())
    offsets = np.repeat(first - np.concatenate([[0], np.cumsum(sizes)[:-1]]), sizes)
    found: Ints = np.arange(total) + offsets
    return found


def ideal_durations(ops: Operations, duration: Floats) -> Floats:
    """The mean of each kind of computation and the median of each kind of communication, for every operation."""
    found = np.empty(len(ops))
    for code in np.unique(ops.op).tolist():
        mine = ops.op == code
        found[mine] = duration[mine].mean() if OPS[code] in COMPUTATION else np.median(duration[mine])
    return found
