"""Circles of waiting: each rank blocked on the next one, the last on the first."""

from __future__ import annotations

from dtobs.calls.waits import circle_in
from dtobs.detectors.hangs.situation import Situation


def circle(situation: Situation, left: frozenset[int]) -> list[int]:
    """The ranks of the first circle among those that are left, in its order; [] when there is none."""
    if not situation.stuck:
        return []
    return circle_in({rank: situation.awaited(rank) for rank in situation.blocked if rank in left})


def unmatched(situation: Situation, rank: int) -> bool:
    """Whether `rank` waits for another one in a send or receive of which its peer has not issued the other half."""
    peer = situation.blocked[rank].peer
    calls = situation.calls
    return peer >= 0 and any(
        calls.exchanged(rank, peer, mine, group) > calls.exchanged(peer, rank, other, group)
        for mine, other in (("recv", "send"), ("send", "recv"))
        for group in calls.exchange_groups(rank, peer)
    )
