"""Ranks whose stacks are alike, together: what a reader wants to see once, not a thousand times."""

from __future__ import annotations

import re
from collections.abc import Iterable

from dtobs.diagnose.model import RankStatus

_PLUMBING = re.compile(r"torch/nn/modules/module\.py:\d+ in .*_call_impl$")
_PACKAGES = re.compile(r"^\S*/(site-packages|dist-packages|lib/python3\.\d+)/")

Alike = tuple[tuple[int, ...], tuple[str, ...]]
"""Ranks, and the stack they share (the most recent call first)."""


def stacks_by_likeness(statuses: Iterable[RankStatus], first: Iterable[int] = ()) -> list[Alike]:
    """Groups of equal stacks; those with a rank of `first` come first, then the rarest."""
    accused = set(first)
    groups: dict[tuple[str, ...], list[int]] = {}
    for status in statuses:
        if status.stack:
            groups.setdefault(status.stack, []).append(status.rank)
    alike = [(tuple(sorted(ranks)), stack) for stack, ranks in groups.items()]
    return sorted(alike, key=lambda one: (not accused & set(one[0]), len(one[0]), one[0]))


def readable(stack: Iterable[str]) -> list[str]:
    """A stack without the frames that every module call goes through, installed files named from their package on."""
    return [_PACKAGES.sub("", frame) for frame in stack if not _PLUMBING.search(frame)]
