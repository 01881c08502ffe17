"""slow-link: one group of ranks moves the same collectives more slowly than the groups beside it.

What it does: groups of one size that issue the same operation on tensors of the same shape are compared, as the shard
groups of a hybrid job or its copies of a pipeline stage are. The time of a transfer is from the arrival of the last
member to the moment the first one goes on, so that late ranks do not count. A group is slow when its median is `SLOWER`
times that of the others and `LEAST_SECONDS` longer, over at least `LEAST_CALLS` calls, with two other groups or more
to tell which one is odd. Only hosts that share a clock and block on what they issue are judged: devices are seen by
`dtobs trace`.

Why it hurts: the whole job waits for the slowest link in every step.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from dtobs.events import Kind
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import bytes_text, duration_text, ranks_text

SLOWER, LEAST_SECONDS, LEAST_CALLS, LEAST_GROUPS = 2.5, 0.02, 12, 3
LAST_EVENTS = 2048
MOST_RANKS = 512
"""Of a larger run, the ranks looked at: reading events of all of them is dear."""

_Call = tuple[int, int, int]  # group, operation, sequence number


def slow_link(view: RunView) -> list[Finding]:
    """One finding a slow group."""
    if len(view.ranks) < 2 * LEAST_GROUPS or len(view.ranks) > MOST_RANKS:
        return []
    groups = view.groups()
    seconds = _transfers(view, {number: set(group.ranks) for number, group in groups.items()})
    kinds: dict[tuple[int, int], dict[int, list[float]]] = defaultdict(dict)
    for (number, op), values in seconds.items():
        if len(values) >= LEAST_CALLS:
            kinds[len(groups[number].ranks), op][number] = values
    found: dict[int, Finding] = {}
    for (_, op), by_group in kinds.items():
        typical = {number: float(np.median(values)) for number, values in by_group.items()}
        for number, own in typical.items():
            others = [value for other, value in typical.items() if other != number]
            if len(others) + 1 < LEAST_GROUPS or own < SLOWER * max(others) or own - max(others) < LEAST_SECONDS:
                continue
            ranks = groups[number].ranks
            what = view.meta(ranks[0]).ops.get(op)
            found[number] = Finding(
                "slow-link",
                f"{what.op if what else 'a collective'} among {ranks_text(ranks)} takes {duration_text(own)} from the"
                f" arrival of its last member, {own / float(np.median(others)):.1f} times as long as in the"
                f" {len(others)} groups beside it",
                ranks,
                Confidence.LIKELY,
                group=str(groups[number]),
                evidence=(
                    {
                        "what": "transfer time",
                        "seconds": own,
                        "others_seconds": float(np.median(others)),
                        "calls": len(by_group[number]),
                        "operation": str(what) if what else "",
                        "size": bytes_text(_size(view, ranks[0], number, op)),
                    },
                ),
            )
    return list(found.values())


def _transfers(view: RunView, members: dict[int, set[int]]) -> dict[tuple[int, int], list[float]]:
    """By group and operation, the seconds of each call that all members issued and waited for."""
    last: dict[_Call, list[int]] = defaultdict(list)
    ended: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank in view.ranks:
        events = view.tail_events(rank, LAST_EVENTS)
        for e in events[events["kind"] == Kind.COLLECTIVE]:
            last[int(e["group"]), int(e["op"]), int(e["seq"])].append(int(e["t_ns"]))
        for e in events[(events["kind"] == Kind.WAIT_END) & (events["group"] != 0)]:
            ended[int(e["group"]), int(e["seq"])].append(int(e["t_ns"]))
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for (group, op, seq), issued in last.items():
        ends = ended.get((group, seq), [])
        size = len(members.get(group, ()))
        if size > 1 and len(issued) == size == len(ends) and min(ends) >= max(issued):
            found[group, op].append((min(ends) - max(issued)) / 1e9)
    return found


def _size(view: RunView, rank: int, group: int, op: int) -> float:
    events = view.tail_events(rank, LAST_EVENTS)
    mine = events[(events["kind"] == Kind.COLLECTIVE) & (events["group"] == group) & (events["op"] == op)]
    return float(mine["value"][-1]) if len(mine) else 0.0
