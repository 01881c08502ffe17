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
_ORDER = "Issue the collectives of different groups in one order on all ranks."


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
    lone, added = (lone, ()) if odd or lone else _alone(situation, ranks)
    waits = (
        ((rank,), blocked_in(situation, rank).removeprefix("in "), (ranks[(n + 1) % len(ranks)],))
        for n, rank in enumerate(ranks)
    )
    return Finding(
        "group-deadlock",
        circle_text(waits, odd, lone, added),
        odd or lone or added or tuple(ranks),
        Confidence.LIKELY if lone or added else Confidence.CERTAIN,
        next_step=_ORDER if odd else "",
        step=int(situation.view.page(ranks[0])["step"]),
        evidence=circle_evidence(situation, shown),
        since_ns=max(int(situation.view.page(rank)["wait_since_ns"]) for rank in ranks),
    )


def _alone(situation: Situation, ranks: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The one rank that stands alone in the calls of the circle: it left one out, or it alone made one.

    Asked of groups of three and more that have all who are blocked; () for both where calls say different ranks. That
    it was left out takes another rank that has gone past the call: else the one that is awaited there may be early.
    """
    left_out, added = set[int](), set[int]()
    for rank in ranks:
        at = situation.blocked[rank]
        members, behind = set(situation.calls.members(at.group)), set(situation.calls.behind(at.group, at.seq))
        if len(members) < 3 or not members.issuperset(situation.blocked):
            continue
        past = {r for r, it in situation.blocked.items() if it.group != at.group} - behind
        if len(behind) == 1:
            left_out |= behind if past else set()
        elif len(members - behind) == 1:
            added |= members - behind
    if len(left_out | added) != 1 or not (left_out | added) <= set(ranks):
        return (), ()
    return tuple(left_out), () if left_out else tuple(added)


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
