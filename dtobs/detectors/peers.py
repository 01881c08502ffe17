"""Which ranks can be compared with each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from dtobs.recording.view import RunView

T = TypeVar("T", bound=Hashable)


def data_groups(view: RunView) -> list[list[int]]:
    """Ranks that do the same work on different samples, as lists of two or more; ranks of unknown place are left out.

    Only ranks that recorded are in them.
    """
    recorded = set(view.ranks)
    groups: set[frozenset[int]] = set()
    before: list[int] | None = None
    members: frozenset[int] = frozenset()
    for rank in view.ranks:
        said = view.meta(rank).layout.get("data_ranks")
        if not isinstance(said, list):
            continue
        if said != before:  # neighbours mostly say the same, and of thousands of ranks a set is dear
            before, members = said, frozenset(said)
        if rank in members:
            groups.add(members)
    found = {tuple(sorted(recorded & members)) for members in groups}
    return [list(group) for group in sorted(found) if len(group) > 1]


def outliers(values: Mapping[int, T]) -> tuple[list[int], bool]:
    """Who differs: the ranks outside the majority, True; or, where there is no majority, all ranks, False."""
    ((common, count),) = Counter(values.values()).most_common(1)
    if 2 * count > len(values):
        return sorted(r for r, v in values.items() if v != common), True
    return sorted(values), False


def rows_of(view: RunView, ranks: Sequence[int]) -> list[int]:
    """The rows of `ranks` in the view's arrays."""
    place = {rank: row for row, rank in enumerate(view.ranks)}
    return [place[r] for r in ranks]
