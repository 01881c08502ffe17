"""Who makes the others wait: by the time its lateness costs them, not by how often it is last.

A rank's lateness at a call is judged without what it waited itself, for others in other groups, since the call before,
and without what of that it still carries: who computes beside a call that it waits for stays ahead of the rank that
comes late to it.
A message between two ranks accuses nobody: the ranks of a pipeline wait for each other however fast all are. What they
waited there counts at the next collective, where the rank with more work of its own is late, be it the first to arrive.
Jitter makes every rank late now and then, and so do stalls, which hit any rank: accused is only a rank whose lateness,
summed by step, would hardly come about when all ranks were alike. The profiler begins and ends amid a step, at another
place on each rank: such a step does not count. Where lateness comes from transfers that take longer in some groups, the
rank that these groups share is accused, and nobody where they share none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dtobs.findings import Confidence
from dtobs.timeline.chance import student_tail
from dtobs.timeline.kineto.figures import IDLE, Figures, figures, rows, step_ends
from dtobs.timeline.kineto.intervals import clipped, joined, length, union, within
from dtobs.timeline.kineto.links import SlowGroup
from dtobs.timeline.kineto.load import Floats, Ints, Spans, TracedRank
from dtobs.timeline.kineto.matching import MatchedTraces, TracedGroup
from dtobs.timeline.kineto.names import KernelKind

KINDS = ("host-bound", "device", "input", "network")
CHANCE, CERTAINTY = 1e-3, 1e-6
WASTE = 0.02
LEAST_STEPS = 3
WEAK_CHANCE, WEAK_SHARE, WEAK_WASTE = 0.05, 0.8, 0.1
"""What makes a rank that nearly all waiting is for `possible`, though too few steps were traced to be sure."""
LEAST_ODDS = 3
"""One in so many times two slow batches are the same rank's by chance, at most, where it is said to be `possible`."""
MOSTLY = 1 / 3
"""Who costs so much of a step at one call was held up there; else its work takes longer."""
EXPLAINED = 0.25
"""Of what a rank in a pipeline comes late, so much at least is seen as more work, or more waiting, of its own."""
PLACES = 4
"""Among so many places of a step at least stalls at random are spread."""
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
    links: tuple[SlowGroup, ...] = ()  #: the slow groups that have it in common


@dataclass
class Lateness:
    """Who came late to the collectives, by whole step; microseconds."""

    groups: list[TracedGroup]
    steps: Ints  #: of each call: its step,
    group: Ints  #: the place of its group,
    place: Ints  #: which of the step's calls of its group it is,
    stretch: Floats  #: how long its ranks had no other call of the group before it (median),
    who: Ints  #: who came last
    cost: Floats  #: and what the others waited for it
    signed: dict[int, dict[int, float]]  #: rank → step → lateness against the median of its peers
    period: float  #: the median step

    def after_first(self) -> Lateness:
        """The same without the first step: what makes a rank late in it may lie before the trace."""
        kept = self.steps > self.steps.min()
        return Lateness(
            self.groups,
            self.steps[kept],
            self.group[kept],
            self.place[kept],
            self.stretch[kept],
            self.who[kept],
            self.cost[kept],
            {rank: dict(sorted(by_step.items())[1:]) for rank, by_step in self.signed.items()},
            self.period,
        )

    def costs(self) -> dict[int, float]:
        """What the others waited for each rank, summed."""
        return {r: float(self.cost[self.who == r].sum()) for r in self.signed}


def lateness(matched: MatchedTraces, ranks: dict[int, TracedRank]) -> Lateness | None:
    """Everybody's lateness; None where no collective of several ranks can be compared."""
    groups = [g for g in matched.groups if g.begin.shape[1] > 1 and g.key[2] is None]
    if len(ranks) < 2 or not groups:
        return None
    steps = _steps(groups)
    return _lateness(groups, _whole(steps), _waits(matched, ranks), _step_time(groups, steps))


def straggler(
    late: Lateness, matched: MatchedTraces, ranks: dict[int, TracedRank], span: float, slow: list[SlowGroup]
) -> Straggler | None:
    """The rank to accuse, or None."""
    found = _latest(late, matched, ranks, span, slow)
    if found is None and len(np.unique(late.steps)) > 2:
        found = _latest(late.after_first(), matched, ranks, span, slow, tries=2)
    if not slow or (found is not None and found.kind != "network"):
        return found
    shared = set[int].intersection(*(set(s.group.ranks) for s in slow))
    if len(slow) < 2 or len(shared) != 1:
        return None  # a link between ranks, which `slow_groups` names
    rank = shared.pop()
    cost = sum(s.extra * (len(s.group.ranks) - 1) for s in slow)
    by_step = float(np.median(list(late.signed.get(rank, {0: 0.0}).values())))
    share = cost / max(cost + sum(late.costs().values()), 1e-3)
    extra = {"network": sum(s.extra for s in slow)}
    return Straggler(rank, cost, "network", Confidence.LIKELY, share, by_step, extra, tuple(slow))


def _latest(
    late: Lateness,
    matched: MatchedTraces,
    ranks: dict[int, TracedRank],
    span: float,
    slow: list[SlowGroup],
    tries: int = 1,
) -> Straggler | None:
    groups, costs = late.groups, late.costs()
    rank = max(costs, key=lambda r: (costs[r], -r))
    total = sum(costs.values())
    by_step = np.array(list(late.signed[rank].values()))
    peers = max(len(g.ranks) for g in groups if rank in g.ranks) - 1
    if not total or costs[rank] / total < 0.5 or costs[rank] / peers < WASTE * span or len(by_step) < 2:
        return None
    stages = _pipeline(rank, ranks)
    same = [n for n, g in enumerate(groups) if rank in g.ranks and not stages & (set(g.ranks) - {rank})]
    behind = float(late.cost[(late.who == rank) & np.isin(late.group, same)].sum())
    if stages and same and behind < WASTE * span * max(len(groups[n].ranks) - 1 for n in same):
        return None  # its stage has more work, on every rank
    alike = len({r for g in groups for r in g.ranks})
    kind, extra = _kind(rank, groups, matched, ranks, slow)
    if stages and extra[kind] < EXPLAINED * float(by_step[1:].sum()):
        return None  # the order of the pipeline's messages made it late
    chance = tries * _chance(late, rank, alike, span, kind)
    weak = chance >= CHANCE or len(by_step) < LEAST_STEPS
    share = costs[rank] / total
    dominant = (share >= WEAK_SHARE or chance < CHANCE) and costs[rank] / peers >= WEAK_WASTE * span
    if weak and not dominant:
        return None
    starved = kind == "input" and extra[kind] >= 0.5 * float(by_step[1:].sum())
    always = by_step.min() >= 0.25 * by_step.max() and alike ** (len(by_step) - 1) >= LEAST_ODDS
    if weak and chance >= WEAK_CHANCE and not (starved and always):
        return None
    sure = chance < CERTAINTY and _complete(matched, ranks, rank) and extra[kind] >= 0.5 * float(by_step.sum())
    confidence = Confidence.CERTAIN if sure else Confidence.LIKELY
    few = not _complete(matched, ranks, rank) and 2 * len(ranks) <= _world(matched, ranks)
    # or its stage has more work, and no other rank has the same; or it is the other end of its slow link
    if weak or few or (stages and (not same or kind == "network")):
        confidence = Confidence.POSSIBLE
    return Straggler(rank, costs[rank], kind, confidence, share, float(np.median(by_step)), extra)


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
    """The number of the step of each call: by ProfilerSteps, else by how the calls repeat, else some calls in a row."""
    told = [g.step for g in groups if g.step is not None]
    if len(told) == len(groups):
        return told
    largest = max(groups, key=lambda g: g.begin.shape[1])
    period = _period([(c.op, c.nbytes) for c in largest.calls])
    if period == 1:
        period = _together(largest.begin)
    edges = largest.last[::-1][::period][::-1]  # from the end, as the calls are matched
    return [np.searchsorted(edges, g.last, side="left") for g in groups]


def _together(begin: Floats) -> int:
    """How many calls in a row are late for one reason, by how the lateness at one goes with that at the next.

    The number of independent ones among n values of an autocorrelation r is n (1 - r) / (1 + r); see Bartlett, "Some
    Aspects of the Time-Correlation Problem in Regard to Tests of Significance", J. Royal Statistical Society 98 (1935).
    """
    late = begin - np.median(begin, axis=0)
    late -= late.mean(axis=1, keepdims=True)
    spread = (late**2).sum(axis=1)
    follows = (late[:, 1:] * late[:, :-1]).sum(axis=1)
    alike = float(np.max(follows[spread > 0] / spread[spread > 0], initial=0.0))
    return max(1, round((1 + alike) / max(1 - alike, 1 / int(begin.shape[1]))))


def _step_time(groups: list[TracedGroup], steps: list[Ints]) -> float:
    """The median time between the last calls of two steps; 0 with fewer than two."""
    ends = step_ends(np.concatenate(steps), np.concatenate([g.last for g in groups]))
    return float(np.median(np.diff(ends))) if len(ends) > 1 else 0.0


def _whole(steps: list[Ints]) -> list[Ints]:
    """The steps, -1 for those at the edges that have fewer calls than the others."""
    numbers, counts = np.unique(np.concatenate(steps), return_counts=True)
    known = numbers >= 0
    numbers, counts = numbers[known], counts[known]
    if len(numbers) < 2:
        return steps
    least = float(np.median(counts[1:-1])) if len(numbers) > 2 else float(counts.max())
    partial = [n for n, count in ((numbers[0], counts[0]), (numbers[-1], counts[-1])) if count < least]
    return [np.where(np.isin(step, partial), -1, step) for step in steps]


def _period(signs: list[tuple[str, int]]) -> int:
    """After how many calls the same calls come again; 1 when they never do, or all are alike."""
    count = len(signs)
    for period in range(1, min(count // 2, 4096) + 1):
        if signs[period:] == signs[:-period]:
            return period
    return 1


def _lateness(groups: list[TracedGroup], steps: list[Ints], waits: dict[int, _Waits], period: float) -> Lateness:
    where, which, places, stretches, who, cost = [], [], [], [], [], []
    signed: dict[int, dict[int, float]] = {}
    for number, (group, step) in enumerate(zip(groups, steps, strict=True)):
        lost = (group.last - group.begin).sum(axis=0)
        skip = int(lost[0] > 2 * float(lost[1:].max()))  # the profilers' own start, not the ranks'
        begin, at = group.begin[:, skip:], step[skip:]
        before = np.concatenate([group.end[:, :1] - np.inf, group.end[:, :-1]], axis=1)[:, skip:]
        waited = [waits[r].elsewhere(group, before[i], begin[i]) for i, r in enumerate(group.ranks)]
        ahead = np.array([within(waits[r].computing, begin[i], group.last[skip:]) for i, r in enumerate(group.ranks)])
        own = begin - _excused(np.array([everything for everything, _ in waited]), ahead)
        theirs = begin - np.array([certain for _, certain in waited])
        last = own.argmax(axis=0)
        behind = np.maximum(own.max(axis=0) - theirs, 0.0)
        behind[last, np.arange(begin.shape[1])] = 0.0
        whole = at >= 0
        numbers, place, counts = np.unique(at[whole], return_inverse=True, return_counts=True)
        where.append(at[whole])
        which.append(np.full(int(whole.sum()), number))
        places.append(np.arange(int(whole.sum())) - (np.cumsum(counts) - counts)[place])
        stretches.append(np.median(begin - before, axis=0)[whole])
        who.append(np.array(group.ranks)[last][whole])
        cost.append(behind.sum(axis=0)[whole])
        for row, rank in enumerate(group.ranks):
            mine = own[row] - np.median(np.delete(theirs, row, axis=0), axis=0)
            table = signed.setdefault(rank, {})
            for s, total in zip(numbers.tolist(), np.bincount(place, mine[whole], len(numbers)).tolist(), strict=True):
                table[s] = table.get(s, 0.0) + total
    return Lateness(
        groups,
        np.concatenate(where),
        np.concatenate(which),
        np.concatenate(places),
        np.concatenate(stretches),
        np.concatenate(who),
        np.concatenate(cost),
        signed,
        period,
    )


def _excused(waited: Floats, ahead: Floats) -> Floats:
    """How much of each arrival is excused, a row a rank, a column a call: what the rank waited elsewhere since the
    call before, and what is left of its excuse there, which is at most what the others computed beside that call.
    """
    found = waited.copy()
    for row in range(len(waited)):
        total = np.cumsum(waited[row])
        lead = np.median(np.delete(ahead, row, axis=0), axis=0)
        left = np.minimum(np.minimum.accumulate(lead - total), 0.0)  # excuse(c + 1) = waited + min(excuse(c), lead(c))
        found[row, 1:] = total[1:] + left[:-1]
    return found


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
    """Everybody's waits. A message is posted long before it is needed: it holds up only a device that does nothing."""
    found, resting = {}, {}
    for number, shift in matched.offsets.items():
        computing = union(ranks[number].of(KernelKind.COMPUTE))
        begin, end = computing.begin - shift, computing.end - shift
        mine = found[number] = _Waits(Spans(begin, end))
        rest = Spans(np.concatenate([[-np.inf], end]), np.concatenate([begin, [np.inf]]))
        resting[number] = rest
        for key, spans in matched.alone.get(number, ()):
            if key[2] is None:
                mine.excuses.append(spans)
            else:
                mine.by_group.append((None, clipped(union(spans), rest)))
    for group in matched.groups:
        for row, rank in enumerate(group.ranks):
            waited = Spans(group.begin[row], group.last)
            if group.key[2] is not None:
                waited = clipped(union(waited), resting[rank])
            found[rank].by_group.append((group, waited))
    return found


def _chance(late: Lateness, rank: int, alike: int, span: float, kind: str) -> float:
    """How likely one of `alike` equal ranks is as late as `rank` is."""
    by_step = np.array(list(late.signed[rank].values()))
    work = max(late.period - float(np.median(by_step)), span * 1e-3)
    order = np.argsort(late.steps, kind="stable")
    firsts = np.flatnonzero(np.diff(late.steps[order]))
    worst = [_worst_call(late, rank, calls) for calls in np.split(order, firsts + 1)]
    places = {place for place, _ in worst}
    jitter, stalls = alike * _jitter(by_step / work), 1.0
    if None not in places:
        stretches = [min(max(stretch / work, 1 / PLACES), 1.0) for _, stretch in worst[1:]]
        stalls = _stalls(by_step, alike, math.prod(stretches) if len(places) == 1 else 1.0)
        if len(late.steps) < PLACES * len(worst):  # with so few calls jitter, too, is seen at one of them
            stalls = max(stalls, jitter)
        if kind != "device":  # stalls, of which some are many times as long as others
            jitter = 1.0
    found = min(alike * _binomial(late, rank, alike), alike * _student(by_step), jitter, stalls)
    return 2 * found


def _worst_call(late: Lateness, rank: int, calls: Ints) -> tuple[tuple[int, int] | None, float]:
    """Where in a step of these calls `rank` came late, None where not mostly at one; and that call's stretch."""
    worst = calls[late.cost[calls].argmax()]
    alone = late.who[worst] == rank and late.cost[worst] >= MOSTLY * float(late.cost[calls].sum())
    place = (int(late.group[worst]), int(late.place[worst]))
    return place if alone else None, float(late.stretch[worst])


def _stalls(by_step: Floats, alike: int, often: float) -> float:
    """How likely stalls of any length (exponential), on any rank, are one rank's in every step, and as even as these.

    `often` is how likely they are at one place besides.

    The least of k such lengths is at least m of their mean with probability (1 - m)^(k - 1): Devroye, "Non-Uniform
    Random Variate Generation" (1986), chapter V, on uniform spacings.
    """
    if by_step.min() <= 0:
        return 1.0
    even = float(by_step.min() / by_step.mean())
    return often * float((1 - even) / alike) ** (len(by_step) - 1)


def _binomial(late: Lateness, rank: int, alike: int) -> float:
    """How likely one of `alike` equal ranks has its share of the cost, by the number of steps that carry it."""
    steps, where = np.unique(late.steps, return_inverse=True)
    total = np.bincount(where, late.cost, len(steps))
    mine = np.bincount(where, np.where(late.who == rank, late.cost, 0.0), len(steps))
    count = int(total.sum() ** 2 / max(float((total**2).sum()), 1e-300))
    often = math.floor(count * float(mine.sum() / total.sum()) + 0.1)
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


def _kind(
    rank: int,
    groups: list[TracedGroup],
    matched: MatchedTraces,
    ranks: dict[int, TracedRank],
    slow: list[SlowGroup],
) -> tuple[str, dict[str, float]]:
    """What the rank has more of than its peers, in a window that all ranks' traces have in common."""
    group = max((g for g in groups if rank in g.ranks), key=lambda g: g.begin.shape)
    measured = _common_window(group, matched, ranks)
    transfers: dict[int, list[Spans]] = {r: [] for r in measured}
    messages = [(g.end - g.last).ravel() for g in matched.groups if g.key[2] is not None]
    usual = float(np.median(np.concatenate(messages))) if messages else 0.0  # ranks amid a pipeline have more of them
    for group in matched.groups:
        begin = group.last + (max(usual, 0.0) if group.key[2] is not None else 0.0)
        for row, member in enumerate(group.ranks):
            transfers[member].append(Spans(begin, np.maximum(group.end[row], begin)))
    peers = [r for r in measured if r != rank]

    def extra(value: dict[int, float]) -> float:
        return value[rank] - float(np.median([value[r] for r in peers]))

    late: tuple[str, ...] = ("host-bound", "allocation", "synchronisation")
    if _pipeline(rank, ranks):
        late = IDLE  # messages are posted early: where none is on its way either, the rank's host is behind
    host = {r: sum(f.idle_by[c] for c in late) for r, f in measured.items()}
    talk = {r: length(union(joined(spans))) for r, spans in transfers.items()}
    found = {
        "host-bound": extra({r: host[r] - f.loading for r, f in measured.items()}),
        "device": extra({r: f.compute + f.memory for r, f in measured.items()}),
        "input": extra({r: f.loading for r, f in measured.items()}),
        "network": sum(s.extra for s in slow if rank in s.group.ranks) if slow else extra(talk),
    }
    return max(found, key=lambda k: found[k]), found


def _common_window(group: TracedGroup, matched: MatchedTraces, ranks: dict[int, TracedRank]) -> dict[int, Figures]:
    """Every rank's figures from the first step's last collective, whose end lets all ranks go at once, to the last."""
    (steps,) = _steps([group])
    first = int(np.flatnonzero(steps == steps[0])[-1])
    if first == len(steps) - 1:
        first = 0  # all calls are of one step
    begin, end = float(group.last[first]), float(group.end[:, -1].max())
    found = {}
    for number, traced in ranks.items():
        shift = matched.offsets.get(number, 0.0)
        inside = (traced.device.begin >= begin + shift) & (traced.device.end <= end + shift)
        found[number] = figures(rows(traced, inside), number, "whole")
    return found
