"""In which call a rank is missing, and which missing ranks are one matter: for every source alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar


@dataclass(frozen=True)
class HeldUp:
    """A call that ranks wait in. `held_by`: those that hold it up; `behind`: how many `waiting` are in an older one."""

    group: int
    seq: int
    held_by: tuple[int, ...]
    waiting: tuple[int, ...]
    behind: int


AnyCall = TypeVar("AnyCall", bound=HeldUp)


def nearest(calls: Iterable[AnyCall]) -> AnyCall:
    """Of the calls that a rank holds up the one to name: others that hold up a call may themselves wait for that rank.

    So the fewer ranks hold a call up, the better; then the fewer wait in an older one, and the more wait in it. Of
    calls that are equal in all this it is the one that the lowest rank waits in: sources number groups differently.
    """
    return max(calls, key=lambda call: (-len(call.held_by), -call.behind, len(call.waiting), -min(call.waiting)))


def missing_in(calls: Iterable[AnyCall], ranks: Iterable[int]) -> list[tuple[tuple[int, ...], AnyCall]]:
    """`ranks` by the call that each is missing in, the lowest first, without those that hold up none."""
    holding: dict[int, list[AnyCall]] = {rank: [] for rank in ranks}
    for call in calls:
        for rank in call.held_by:
            if rank in holding:
                holding[rank].append(call)
    found: dict[AnyCall, list[int]] = {}
    for rank, held in sorted(holding.items()):
        if held:
            found.setdefault(nearest(held), []).append(rank)
    return [(tuple(missing), call) for call, missing in found.items()]


def matters(calls: Iterable[AnyCall], ranks: Iterable[int]) -> list[tuple[tuple[int, ...], AnyCall]]:
    """As `missing_in`, but ranks that all hold up one call, as those of a lost host do, are one matter."""
    calls = list(calls)
    apart = missing_in(calls, ranks)
    everyone = {rank for missing, _ in apart for rank in missing}
    common = [call for call in calls if everyone <= set(call.held_by)]
    return apart if len(apart) < 2 or not common else [(tuple(sorted(everyone)), nearest(common))]
