"""Who makes the others wait: by the time its lateness costs them, not by how often it is last.

A rank's lateness at a call is judged without what it waited itself, for others in other groups, since the call before.
A message between two ranks accuses nobody: the ranks of a pipeline wait for each other however fast all are. What they
waited there counts at the next collective, where the rank with more work of its own is late, be it the first to arrive.
Jitter makes every rank late now and then: accused is only a rank whose lateness, summed by step, would hardly come
about when all ranks were alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dtobs.findings import Confidence
from dtobs.timeline.chance import student_tail
from dtobs.timeline.kineto.figures import Figures
from dtobs.timeline.kineto.intervals import clipped, joined, union, within
from dtobs.timeline.kineto.load import Floats, Ints, Spans, TracedRank
from dtobs.timeline.kineto.matching import MatchedTraces, TracedGroup
from dtobs.timeline.kineto.names import KernelKind

KINDS = ("host-bound", "device", "input", "network")
CHANCE, CERTAINTY = 1e-3, 1e-6
WASTE = 0.02
LEAST_EVENTS = 3
JITTER = 0.3
"""What a healthy rank's work may vary by from step to step."""


@dataclass(frozen=True)
class Straggler:
    """The rank that costs its peers most; `cost` is what they waited for it, summed, in microseconds."""

    rank: int
    cost: float
    kind: str
    confidence: Confidence
    share: float  #: of the time that anybody waited for anybody
    late: float  #: median lateness a step
    extra: dict[str, float]  #: what it has more of than its peers, by kind


@dataclass
class _Lateness:
    """Events of lateness: at which step, of which group, who, what it cost, and how late each rank was there."""

    steps: Ints
    group: Ints
    who: Ints
    cost: Floats
    signed: dict[int, dict[int, float]]  #: rank → step → lateness against the median of its peers


def straggler(matched: MatchedTraces, ranks: dict[int, TracedRank], figures: dict[int, Figures]) -> Straggler | None:
    """The rank to accuse, or None."""
    groups = [g for g in matched.groups if g.begin.shape[1] > 1 and g.key[2] is None]
    if len(ranks) < 2 or not groups:
        return None
    steps = _steps(groups)
    late = _lateness(groups, steps, _waits(matched, ranks))
    costs = {r: float(late.cost[late.who == r].sum()) for r in ranks}
    rank = max(costs, key=lambda r: (costs[r], -r))
    total = sum(costs.values())
    span = max(f.span for f in figures.values())
    by_step = np.array(list(late.signed.get(rank, {}).values()))
    peers = max(len(g.ranks) for g in groups if rank in g.ranks) - 1 if total else 1
    if not total or costs[rank] / total < 0.5 or costs[rank] / peers < WASTE * span or len(by_step) < LEAST_EVENTS:
        return None
    stages = _pipeline(rank, ranks)
    same = [n for n, g in enumerate(groups) if rank in g.ranks and not stages & (set(g.ranks) - {rank})]
    behind = float(late.cost[(late.who == rank) & np.isin(late.group, same)].sum())
    if stages and same and behind < WASTE * span * max(len(groups[n].ranks) - 1 for n in same):
        return None  # its stage has more work, on every rank
    alike = len({r for g in groups for r in g.ranks})
    steps_seen = max(len({s for table in late.signed.values() for s in table}), 1)
    work = max(span / steps_seen - float(np.median(by_step)), span * 1e-3)
    chance = 2 * alike * min(_binomial(late, rank, alike), _student(by_step), _jitter(by_step / work))
    if chance >= CHANCE:
        return None
    kind, extra = _kind(rank, matched, figures)
    sure = chance < CERTAINTY and _complete(matched, ranks, rank) and extra[kind] >= 0.5 * float(by_step.sum())
    confidence = Confidence.CERTAIN if sure else Confidence.LIKELY
    few = not _complete(matched, ranks, rank) and 2 * len(ranks) <= _world(matched, ranks)
    if few or (stages and not same):  # or its stage has more work: no other rank has the same
        confidence = Confidence.POSSIBLE
    return Straggler(rank, costs[rank], kind, confidence, costs[rank] / total, float(np.median(by_step)), extra)


def _world(matched: MatchedTraces, ranks: dict[int, TracedRank]) -> int:
    members = {m for g in matched.groups for m in g.members} | set(ranks)
    largest = max((call.size for rank in ranks.values() for call in rank.calls), default=0)
    return max(len(members), largest)


def _complete(matched: MatchedTraces, ranks: dict[int, TracedRank], rank: int) -> bool:
    """Whether the files of all ranks are there, whole, and the groups that they speak of known."""
    known = all(g.key[1] or g.key[2] or (g.calls[0].size == len(g.ranks)) for g in matched.groups if rank in g.ranks)
    return known and _world(matched, ranks) == len(ranks) and not any(r.damage for r in ranks.values())


def _pipeline(rank: int, ranks: dict[int, TracedRank]) -> set[int]:
    """The ranks that `rank` exchanges messages with, directly or by way of others, itself among them; empty if none."""
    near: dict[int, set[int]] = {r: set() for r in ranks}
    for number, traced in ranks.items():
        for call in {traced.calls[c] for c in np.unique(traced.call[traced.call >= 0]).tolist()}:
            if call.op == "send_recv":
                named = {peer for peer in call.peers or () if peer >= 0} - {number}
                for other in named or set(call.ranks or ranks) - {number}:
                    near.setdefault(number, set()).add(other)
                    near.setdefault(other, set()).add(number)
    found, new = set(), {rank} if near[rank] else set()
    while new:
        found |= new
        new = {other for one in new for other in near[one]} - found
    return found


def _steps(groups: list[TracedGroup]) -> list[Ints]:
    """The number of the step of each call: by ProfilerSteps, else by how the calls repeat, else each on its own."""
    told = [g.step for g in groups if g.step is not None]
    if len(told) == len(groups):
        return told
    largest = max(groups, key=lambda g: g.begin.shape[1])
    period = _period([(c.op, c.nbytes) for c in largest.calls])
    edges = largest.last[::period]
    return [np.searchsorted(edges, g.last, side="right") for g in groups]


def _period(signs: list[tuple[str, int]]) -> int:
    """After how many calls the same calls come again; 1 when they never do, or all are alike."""
    count = len(signs)
    for period in range(1, min(count // 2, 4096) + 1):
        if signs[period:] == signs[:-period]:
            return period
    return 1


def _lateness(groups: list[TracedGroup], steps: list[Ints], waits: dict[int, _Waits]) -> _Lateness:
    where, which, who, cost = [], [], [], []
    signed: dict[int, dict[int, float]] = {}
    for number, (group, step) in enumerate(zip(groups, steps, strict=True)):
        lost = (group.last - group.begin).sum(axis=0)
        skip = int(lost[0] > 2 * float(lost[1:].max()))  # the profilers' own start, not the ranks'
        begin, at = group.begin[:, skip:], step[skip:]
        before = np.concatenate([group.end[:, :1] - np.inf, group.end[:, :-1]], axis=1)[:, skip:]
        waited = [waits[r].elsewhere(group, before[i], begin[i]) for i, r in enumerate(group.ranks)]
        own = begin - np.array([everything for everything, _ in waited])
        theirs = begin - np.array([held_up for _, held_up in waited])
        last = own.argmax(axis=0)
        lateness = np.maximum(own.max(axis=0) - theirs, 0.0)
        lateness[last, np.arange(begin.shape[1])] = 0.0
        where.append(at)
        which.append(np.full(len(at), number))
        who.append(np.array(group.ranks)[last])
        cost.append(lateness.sum(axis=0))
        for row, rank in enumerate(group.ranks):
            mine = own[row] - np.median(np.delete(theirs, row, axis=0), axis=0)
            totals = np.bincount(at - at.min(), mine)
            table = signed.setdefault(rank, {})
            for s in np.unique(at).tolist():
                table[s] = table.get(s, 0.0) + float(totals[s - at.min()])
    return _Lateness(np.concatenate(where), np.concatenate(which), np.concatenate(who), np.concatenate(cost), signed)


class _Waits:
    """One rank's waits for others, by group; times are those of the common clock."""

    def __init__(self, computing: Spans) -> None:
        self.computing = computing
        self.by_group: list[tuple[TracedGroup | None, Spans]] = []  #: no group: messages of which nobody knows more
        self.excuses: list[Spans] = []  #: collectives whose others are not there: it may have waited all of them

    def elsewhere(self, group: TracedGroup, begin: Floats, end: Floats) -> tuple[Floats, Floats]:
        """What it waited between two times in other groups than `group`: all that it may have, and what certainly held
        its device up.
        """
        waits = union(joined([spans for one, spans in self.by_group if one is not group]))
        held_up = within(waits, begin, end) - within(clipped(waits, self.computing), begin, end)
        return within(union(joined([waits, *self.excuses])), begin, end), held_up


def _waits(matched: MatchedTraces, ranks: dict[int, TracedRank]) -> dict[int, _Waits]:
    found = {}
    for number, shift in matched.offsets.items():
        computing = union(ranks[number].of(KernelKind.COMPUTE))
        mine = found[number] = _Waits(Spans(computing.begin - shift, computing.end - shift))
        for key, spans in matched.alone.get(number, ()):
            if key[2] is None:
                mine.excuses.append(spans)
            else:
                mine.by_group.append((None, spans))
    for group in matched.groups:
        for row, rank in enumerate(group.ranks):
            found[rank].by_group.append((group, Spans(group.begin[row], group.last)))
    return found


def _binomial(late: _Lateness, rank: int, alike: int) -> float:
    """How likely one of `alike` equal ranks has its share of the cost, by the number of steps that carry it."""
    steps, where = np.unique(late.steps, return_inverse=True)
    total = np.bincount(where, late.cost, len(steps))
    mine = np.bincount(where, np.where(late.who == rank, late.cost, 0.0), len(steps))
    count = int(total.sum() ** 2 / max(float((total**2).sum()), 1e-300))
    often = math.floor(count * float(mine.sum() / total.sum()))
    rate = 1 / alike
    every = math.lgamma(count + 1)
    return sum(
        math.exp(
            every - math.lgamma(k + 1) - math.lgamma(count - k + 1) + _power(rate, k) + _power(1 - rate, count - k)
        )
        for k in range(often, count + 1)
    )


def _power(rate: float, times: int) -> float:
    return times * math.log(rate)


def _jitter(ratios: Floats) -> float:
    """How likely the lateness of every step, in work of a peer, is where work varies by `JITTER` (normal)."""
    least = float(ratios.min())
    if least <= 0:
        return 1.0
    spread = JITTER * math.sqrt(1 + (1 + least) ** 2)
    return float((math.erfc(least / spread / math.sqrt(2)) / 2) ** len(ratios))


def _student(values: Floats) -> float:
    """How likely a mean like that of `values` is where the true one is 0 (one-sided, Student's t)."""
    freedom = len(values) - 1
    spread = float(values.std(ddof=1))
    mean = float(values.mean())
    if mean <= 0:
        return 1.0
    t = mean / max(spread / math.sqrt(len(values)), mean * 1e-6)
    return student_tail(t, freedom)


def _kind(rank: int, matched: MatchedTraces, figures: dict[int, Figures]) -> tuple[str, dict[str, float]]:
    """What the rank has more of than its peers."""
    waited = dict.fromkeys(figures, 0.0)
    for group in matched.groups:
        for row, member in enumerate(group.ranks):
            waited[member] += float((group.last - group.begin[row]).sum())
    peers = [r for r in figures if r != rank]

    def extra(value: dict[int, float]) -> float:
        return value[rank] - float(np.median([value[r] for r in peers]))

    host = {r: sum(f.idle_by[c] for c in ("host-bound", "allocation", "synchronisation")) for r, f in figures.items()}
    found = {
        "host-bound": extra({r: host[r] - f.loading for r, f in figures.items()}),
        "device": extra({r: f.compute + f.memory for r, f in figures.items()}),
        "input": extra({r: f.loading for r, f in figures.items()}),
        "network": extra({r: max(f.communication - waited[r], 0.0) for r, f in figures.items()}),
    }
    return max(found, key=lambda k: found[k]), found
