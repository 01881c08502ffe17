"""Ranks whose stacks are alike, together: what a reader wants to see once, not a thousand times."""

from __future__ import annotations

import re
from collections.abc import Iterable

from dtobs.diagnose.model import RankStatus
from dtobs.host.stacks import alike, folded, stands_in

_PACKAGES = re.compile(r"^\S*/(site-packages|dist-packages|lib/python3\.\d+)/")

Alike = tuple[tuple[int, ...], tuple[str, ...]]
"""Ranks, and the stack they share (the most recent call first)."""


def stacks_by_likeness(statuses: Iterable[RankStatus], first: Iterable[int] = ()) -> list[Alike]:
    """Groups of ranks that stand at the same lines and in the same call of a library.

    Those with a rank of `first` come first, then the rarest.
    """
    accused = set(first)
    places: dict[tuple[str, ...], dict[str, list[RankStatus]]] = {}
    for status in statuses:
        if status.stack:
            places.setdefault(alike(status.stack), {}).setdefault(stands_in(status.stack), []).append(status)
    for calls in places.values():  # a tool that shows no library tells none of the calls apart
        if "" in calls and len(calls) > 1:
            untold = calls.pop("")
            max(calls.values(), key=len).extend(untold)
    groups = [group for calls in places.values() for group in calls.values()]
    found = [(tuple(sorted(s.rank for s in group)), group[0].stack) for group in groups]
    return sorted(found, key=lambda one: (not accused & set(one[0]), len(one[0]), one[0]))


def readable(stack: Iterable[str]) -> list[str]:
    """A stack that opens at the user's lines: library frames folded, installed files named from their package on."""
    return [_PACKAGES.sub("", frame) for frame in folded(stack)]
