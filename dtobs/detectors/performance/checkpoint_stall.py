"""checkpoint-stall: the training stands still for a good part of its time while checkpoints are written.

What it does: adds up the checkpoint phase of the newest steps. It is a stall when it takes `SHARE` of at least
`LEAST_SECONDS`, in `LEAST_TIMES` checkpoints or more that each took
`LEAST_EACH` seconds and `LONG` times an ordinary step: a short run that
ends with its only checkpoint is none, nor is one that keeps small states often.

Why it hurts: every device of the job idles meanwhile.
"""

from __future__ import annotations

import numpy as np

from dtobs.events import walls_ns
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import duration_text, ranks_text

LAST = 4096
SHARE = 0.25
LEAST_SECONDS, LEAST_TIMES, LEAST_EACH, LONG = 120.0, 3, 5.0, 3.0


def checkpoint_stall(view: RunView) -> list[Finding]:
    """At most one finding, with all ranks that write."""
    stalled: dict[int, tuple[float, float, int, int]] = {}
    for rank in view.ranks:
        steps = view.rank_steps(rank)[-LAST:]
        if not len(steps):
            continue
        wall = walls_ns(steps) / 1e9
        saving = steps["checkpoint_ns"].astype(np.float64) / 1e9
        ordinary = float(np.median(wall - saving))
        long = saving > max(LONG * ordinary, LEAST_EACH)
        total = float(wall.sum())
        if total >= LEAST_SECONDS and long.sum() >= LEAST_TIMES and saving[long].sum() >= SHARE * total:
            each = saving[long]
            first = int(steps["step"][long][0])
            stalled[rank] = (float(each.sum()) / total, float(np.median(each)), len(each), first)
    if not stalled:
        return []
    share, typical, times, step = max(stalled.values())
    return [
        Finding(
            "checkpoint-stall",
            f"checkpoints take {share:.0%} of the time on {ranks_text(stalled)}:"
            f" {times} of them, {duration_text(typical)} each",
            tuple(stalled),
            Confidence.CERTAIN,
            step=step,
            evidence=tuple(
                {"what": "checkpoint time", "rank": r, "share": s, "median_seconds": t, "checkpoints": n}
                for r, (s, t, n, _) in sorted(stalled.items())[:16]
            ),
        )
    ]
