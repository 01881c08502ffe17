"""slow-link: one group of ranks moves the same collectives more slowly than the groups beside it.

What it does: groups of one size that issue the same operation on tensors of the same shape are compared, as the shard
groups of a hybrid job or its copies of a pipeline stage are, by the time of their transfers (see `transfers`). A group
is slow when its median is `SLOWER` times that of the others and `LEAST_SECONDS` longer, over at least `LEAST_CALLS`
calls, with two other groups or more to tell which one is odd. Only hosts that share a clock and block on what they
issue are judged: devices are seen by `dtobs trace`.

Why it hurts: the whole job waits for the slowest link in every step.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from dtobs.detectors.performance.transfers import transfers
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import bytes_text, duration_text, ranks_text

SLOWER, LEAST_SECONDS, LEAST_CALLS, LEAST_GROUPS = 2.5, 0.02, 12, 3
LAST_EVENTS = 2048
MOST_RANKS = 512
"""Of a larger run, the ranks looked at: reading events of all of them is dear."""


def slow_link(view: RunView) -> list[Finding]:
    """One finding a slow group."""
    if len(view.ranks) < 2 * LEAST_GROUPS or len(view.ranks) > MOST_RANKS:
        return []
    groups = view.groups()
    kinds: dict[tuple[int, int], dict[int, list[float]]] = defaultdict(dict)
    sizes: dict[tuple[int, int], float] = {}
    for (number, op), calls in transfers(view, view.ranks, LAST_EVENTS).items():
        if len(calls) >= LEAST_CALLS:
            kinds[len(groups[number].ranks), op][number] = [call.seconds for call in calls]
            sizes[number, op] = calls[-1].nbytes
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
                        "size": bytes_text(sizes[number, op]),
                    },
                ),
            )
    return list(found.values())
