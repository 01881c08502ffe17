"""``group-deadlock``: ranks wait for each other in a circle across process groups.

Why it hurts: every rank is inside a collective, so none looks at fault. It takes two groups that share ranks, used in
another order on some of them. The evidence is the circle: each rank is blocked in a collective that the next one in
the circle has not issued, because it is blocked itself.
"""

from __future__ import annotations

from dtobs.calls.order import odd_ranks, smaller_side
from dtobs.calls.words import circle_text
from dtobs.detectors.hangs.describe import blocked_in, circle_evidence
from dtobs.detectors.hangs.situation import Situation, Told
from dtobs.findings import Confidence, Finding

_MAX_SHOWN = 8


def find(situation: Situation, left: frozenset[int]) -> Told:
    """The first circle, unless a send or a receive is part of it."""
    ranks = situation.circle(left)
    if not ranks or any(situation.blocked[rank].peer >= 0 for rank in ranks):
        return Told()
    return situation.told([_finding(situation, ranks)])


def _finding(situation: Situation, ranks: list[int]) -> Finding:
    shown = ranks[:_MAX_SHOWN]
    blocked = {rank: situation.blocked[rank] for rank in ranks}
    odd = odd_ranks({rank: situation.calls.history(rank, at.group, at.seq) for rank, at in blocked.items()})
    lone = () if odd else smaller_side(_sides(situation, ranks))
    waits = (
        ((rank,), blocked_in(situation, rank).removeprefix("in "), (ranks[(n + 1) % len(ranks)],))
        for n, rank in enumerate(ranks)
    )
    return Finding(
        "group-deadlock",
        circle_text(waits, odd, lone),
        odd or lone or tuple(ranks),
        Confidence.LIKELY if lone else Confidence.CERTAIN,
        step=int(situation.view.page(ranks[0])["step"]),
        evidence=circle_evidence(situation, shown),
        since_ns=max(int(situation.view.page(rank)["wait_since_ns"]) for rank in ranks),
    )


def _sides(situation: Situation, ranks: list[int]) -> list[tuple[list[int], list[int]]]:
    """Of each call of the circle who waits in it, and who has not issued it."""
    blocked = situation.blocked
    return [
        (
            [rank for rank, at in blocked.items() if (at.group, at.seq) == (group, seq)],
            situation.calls.behind(group, seq),
        )
        for group, seq in dict.fromkeys((blocked[rank].group, blocked[rank].seq) for rank in ranks)
    ]
