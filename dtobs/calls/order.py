"""The order of a rank's calls: against its own history, and against a peer's that made a call more or fewer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_SHIFT = 4
RECENT = 8
"""A single odd call is believed only where something else went wrong at most this many calls later."""


def shifts(mine: npt.NDArray[Any], theirs: npt.NDArray[Any]) -> Iterator[tuple[int, int]]:
    """By how many calls `mine` may be ahead of `theirs` (behind, below 0), and how many then agree: all there are.

    Smaller shifts come first.
    """
    for shift in (s for size in range(1, MAX_SHIFT + 1) for s in (size, -size)):
        ours, others = (mine[shift:], theirs) if shift > 0 else (mine, theirs[-shift:])
        length = min(len(ours), len(others))
        if length and np.array_equal(ours[:length], others[:length]):
            yield shift, length


@dataclass(frozen=True)
class History:
    """All that a rank issued up to a call, that one last: `group` (−1 for a send or a receive), and `way`.

    Equal numbers in `way` are the same operation from the same line.
    """

    group: npt.NDArray[np.int64]
    way: npt.NDArray[np.int64]

    def of_last_group(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The calls of the last one's group: their places among all, and their ways."""
        place = np.flatnonzero(self.group == self.group[-1])
        return place, self.way[place]


def odd_ranks(waits: Mapping[int, History]) -> tuple[int, ...]:
    """Of ranks that wait for each other, those that came to the call they wait in by another order than before.

    Empty when all of them did, none did, or the history of one is too short to say.
    """
    news = {rank: _is_new(history) for rank, history in waits.items()}
    if None in news.values():
        return ()
    odd = tuple(sorted(rank for rank, new in news.items() if new))
    return odd if len(odd) < len(news) else ()


def smaller_side(sides: Sequence[tuple[Collection[int], Collection[int]]]) -> tuple[int, ...]:
    """The ranks of the smaller side of two calls whose ranks wait for each other; () where that tells nothing.

    A side is who waits in its call and who keeps it from completing. Each side has to keep the other from its call, as
    in two groups of the same ranks: where a part of them has a group of its own, the smaller side may be right.
    """
    if len(sides) != 2:
        return ()
    (few, awaited), (many, missing) = sorted(sides, key=lambda side: len(side[0]))
    whole = set(awaited) == set(many) and set(missing) == set(few)
    return tuple(sorted(few)) if whole and len(few) < len(many) else ()


def came_before(history: History) -> bool:
    """Whether the last call has already followed the one before it in its group, so that it is the usual next one."""
    _, ways = history.of_last_group()
    return len(ways) >= 3 and bool(((ways[:-2] == ways[-2]) & (ways[1:-1] == ways[-1])).any())


def _is_new(history: History) -> bool | None:
    """Whether the last call never before came so many calls after its group's last one; None without an earlier one."""
    place, ways = history.of_last_group()
    distance = np.diff(place)
    alike = ways[1:-1] == ways[-1]
    if not alike.any():
        return None
    return not bool((distance[:-1][alike] == distance[-1]).any())
