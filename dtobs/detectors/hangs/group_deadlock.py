"""``group-deadlock``: ranks wait for each other in a circle across process groups.

Why it hurts: every rank is inside a collective, so none looks at fault. It takes two groups that share ranks, used in
another order on some of them. The evidence is the circle: each rank is blocked in a collective that the next one in
the circle has not issued, because it is blocked itself.
"""

from __future__ import annotations

from dtobs.calls.order import odd_ranks
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
    alone = () if odd else _alone(situation, ranks)
    waits = (
        ((rank,), blocked_in(situation, rank).removeprefix("in "), (ranks[(n + 1) % len(ranks)],))
        for n, rank in enumerate(ranks)
    )
    return Finding(
        "group-deadlock",
        circle_text(waits, odd, alone),
        odd or alone or tuple(ranks),
        Confidence.LIKELY if alone else Confidence.CERTAIN,
        step=int(situation.view.page(ranks[0])["step"]),
        evidence=circle_evidence(situation, shown),
        since_ns=max(int(situation.view.page(rank)["wait_since_ns"]) for rank in ranks),
    )


def _alone(situation: Situation, ranks: list[int]) -> tuple[int, ...]:
    """Of a circle between two calls the ranks in one of them, if only they, and fewer than there are in the other, keep
    the other from completing; () where neither side is smaller.
    """
    waiting: dict[tuple[int, int], set[int]] = {}
    for rank, at in situation.blocked.items():
        waiting.setdefault((at.group, at.seq), set()).add(rank)
    sides = {(at.group, at.seq) for at in (situation.blocked[rank] for rank in ranks)}
    if len(sides) != 2:
        return ()
    few, many = sorted(sides, key=lambda side: len(waiting[side]))
    missing = set(situation.calls.behind(*many))
    smaller = len(waiting[few]) < len(waiting[many])
    return tuple(sorted(missing)) if smaller and missing and missing <= waiting[few] else ()
