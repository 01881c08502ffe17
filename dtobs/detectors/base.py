"""What a detector is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dtobs.findings import Finding
from dtobs.recording.view import RunView

Detector = Callable[[RunView], list[Finding]]
"""A pure function of what was recorded: the same view gives the same findings, in whatever order the ranks are."""


def named(ranks: Sequence[int], limit: int = 8) -> str:
    """ "rank 3", "ranks 0, 2 and 5", "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 120 more"."""
    shown = [str(r) for r in sorted(ranks)]
    if len(shown) == 1:
        return f"rank {shown[0]}"
    if len(shown) > limit:
        return f"ranks {', '.join(shown[:limit])} and {len(shown) - limit} more"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
