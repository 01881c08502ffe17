"""Groups of ranks whose transfers take longer than the same ones of the groups beside them.

Compared are groups of one size without a common rank that call the same operation on as many bytes, as the tensor
groups of a job are, or its data groups. A transfer runs from the arrival of the last member to the end, so that late
ranks do not count. A transfer that is hidden behind kernels costs nothing and is no finding.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from dtobs.timeline.kineto.intervals import union, within
from dtobs.timeline.kineto.load import Floats, Spans, TracedRank
from dtobs.timeline.kineto.matching import MatchedTraces, TracedGroup
from dtobs.timeline.kineto.names import KernelKind

SLOWER = 1.5
"""Groups that share switches and hosts with other work differ by some ten per cent."""
LEAST_CALLS = 6
WASTE = 0.02
"""Of the span: what the longer transfers have to cost."""

_Kind = tuple[str, int]  # operation and bytes


@dataclass(frozen=True)
class SlowGroup:
    """A group whose transfers take longer; times in microseconds."""

    group: TracedGroup
    op: str
    ratio: float  #: of a transfer to those of the groups beside it, in the kind of call that costs most
    extra: float  #: what it lost by them in the whole window, where nothing else computed
    beside: int  #: how many groups it was compared with


def slow_groups(matched: MatchedTraces, ranks: dict[int, TracedRank], span: float) -> list[SlowGroup]:
    """The slow groups among those of which every member's file is there, in a window of `span` microseconds."""
    whole = [g for g in matched.groups if g.key[2] is None and len(g.ranks) == max(g.calls[0].size, len(g.members), 2)]
    if len(whole) < 2:
        return []
    times = [_transfers(group) for group in whole]
    quartiles = [{kind: np.percentile(took, (25, 50, 75)) for kind, took in of.items()} for of in times]
    slow = []
    for place, group in enumerate(whole):
        beside = [
            n for n, other in enumerate(whole) if len(other.ranks) == len(group.ranks) and not _common(other, group)
        ]
        by_kind: dict[_Kind, tuple[float, float]] = {}
        compared = 0
        for kind, mine in times[place].items():
            theirs = [quartiles[n][kind] for n in beside if len(times[n].get(kind, ())) >= LEAST_CALLS]
            if len(mine) < LEAST_CALLS or not theirs:
                continue
            low, middle, _ = quartiles[place][kind].tolist()
            _, typical, high = np.median(theirs, axis=0).tolist()
            if middle >= SLOWER * typical and low > high:
                by_kind[kind] = (float((mine - typical).sum()), middle / max(typical, 1e-3))
                compared = max(compared, len(theirs))
        extra = sum(lost for lost, _ in by_kind.values())
        if extra < WASTE * span or (extra := extra * _exposed(matched, group, ranks)) < WASTE * span:
            continue
        worst = max(by_kind, key=lambda k: by_kind[k][0])
        slow.append(SlowGroup(group, worst[0], by_kind[worst][1], extra, compared))
    return sorted(slow, key=lambda s: -s.extra)


def _common(one: TracedGroup, other: TracedGroup) -> bool:
    return bool(set(one.ranks) & set(other.ranks))


def _transfers(group: TracedGroup) -> dict[_Kind, Floats]:
    took = np.maximum(group.end.max(axis=0) - group.last, 0.0)
    rows: dict[_Kind, list[int]] = defaultdict(list)
    for row, call in enumerate(group.calls):
        rows[call.op, call.nbytes].append(row)
    return {kind: took[chosen] for kind, chosen in rows.items()}


def _exposed(matched: MatchedTraces, group: TracedGroup, ranks: dict[int, TracedRank]) -> float:
    """The part of the group's transfers beside which a member computes nothing, of the member with most of it."""
    last, most = group.last, 0.0
    for row, rank in enumerate(group.ranks):
        shift = matched.offsets[rank]
        computing = union(ranks[rank].of(KernelKind.COMPUTE))
        end = np.maximum(group.end[row], last)
        hidden = within(Spans(computing.begin - shift, computing.end - shift), last, end).sum()
        most = max(most, 1.0 - float(hidden) / max(float((end - last).sum()), 1e-3))
    return most
