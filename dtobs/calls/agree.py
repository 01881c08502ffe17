"""Which of several ways a call was made is the one that was meant, and whose ranks are odd.

The way that more than half of the group's ranks called counts as meant: then nobody who is not known yet can turn it
over. With no such majority (two ranks, three ways among four) the disagreement is a fact, and nobody is singled out.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from dtobs.findings import Confidence


@dataclass(frozen=True)
class Parties:
    """Ranks by the way that they made one call, the largest party first.

    `odd`: those outside the majority; without a majority everybody who made the call.
    """

    parties: tuple[tuple[int, ...], ...]
    odd: tuple[int, ...]
    majority: bool

    @property
    def confidence(self) -> Confidence:
        """How sure it is that one of `odd` is at fault; of two ranks, that their calls cannot both be right."""
        return Confidence.CERTAIN if self.majority else Confidence.LIKELY


def judge(ways: Mapping[int, Hashable], size: int) -> Parties | None:
    """Sort the ranks that made a call, of a group of `size`, by their ways; None where all made it in one."""
    members: dict[Hashable, list[int]] = {}
    for rank, way in sorted(ways.items()):
        members.setdefault(way, []).append(rank)
    if len(members) < 2:
        return None
    parties = tuple(sorted((tuple(ranks) for ranks in members.values()), key=lambda ranks: (-len(ranks), ranks[0])))
    majority = 2 * len(parties[0]) > max(size, len(ways))
    odd = sorted(rank for party in parties[1:] for rank in party) if majority else sorted(ways)
    return Parties(parties, tuple(odd), majority)
