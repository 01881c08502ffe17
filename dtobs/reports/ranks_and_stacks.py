"""Ranks whose stacks are alike, together: what a reader wants to see once, not a thousand times."""

from __future__ import annotations

import re
from collections.abc import Iterable

from dtobs.diagnose.model import RankStatus
from dtobs.host.stacks import alike, folded

_PACKAGES = re.compile(r"^\S*/(site-packages|dist-packages|lib/python3\.\d+)/")

Alike = tuple[tuple[int, ...], tuple[str, ...]]
"""Ranks, and the stack they share (the most recent call first)."""


def stacks_by_likeness(statuses: Iterable[RankStatus], first: Iterable[int] = ()) -> list[Alike]:
    """Groups of ranks that stand at the same lines; those with a rank of `first` come first, then the rarest."""
    accused = set(first)
    groups: dict[tuple[str, ...], list[RankStatus]] = {}
    for status in statuses:
        if status.stack:
            groups.setdefault(alike(status.stack), []).append(status)
    found = [(tuple(sorted(s.rank for s in group)), group[0].stack) for group in groups.values()]
    return sorted(found, key=lambda one: (not accused & set(one[0]), len(one[0]), one[0]))


def readable(stack: Iterable[str]) -> list[str]:
    """A stack that opens at the user's lines: library frames folded, installed files named from their package on."""
    return [_PACKAGES.sub("", frame) for frame in folded(stack)]
