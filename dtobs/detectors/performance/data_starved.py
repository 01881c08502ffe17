"""data-starved: steps spend a good part of their time waiting for data.

What it does: adds up the time of the data phase over the recent steps, without the first ones of the attempt. A rank
is starved when data takes `SHARE` of the time in total and in the median step, and at least `LEAST_SECONDS` a step (a
toy model's step is all overhead). Ranks that merely wait for a starved one do not count.

Why it hurts: the accelerator is idle meanwhile, on all ranks of the job.
"""

from __future__ import annotations

import numpy as np

from dtobs.detectors.performance.lines import line_of_data
from dtobs.detectors.performance.window import step_times
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import duration_text, ranks_do

LEAST_STEPS = 12
SHARE = 0.25
LEAST_SECONDS = 0.02


def data_starved(view: RunView) -> list[Finding]:
    """At most one finding, with all starved ranks."""
    starved: dict[int, tuple[float, float, int, int]] = {}
    for row, rank in enumerate(view.ranks):
        times = step_times(view, [row])
        if times is None or len(times.steps) < LEAST_STEPS:
            continue
        data, wall = times.parts["data"][0], times.wall[0]
        share = float(data.sum() / max(float(wall.sum()), 1e-9))
        typical = float(np.median(data))
        if share >= SHARE and float(np.median(data / np.maximum(wall, 1e-9))) >= SHARE and typical >= LEAST_SECONDS:
            starved[rank] = (share, typical, int(times.steps[0]), int(times.end_ns[0, 0]))
    if not starved:
        return []
    worst = max(starved, key=lambda r: (starved[r][0], -r))
    share, typical, _, _ = starved[worst]
    upto = "up to " if len(starved) > 1 else ""
    seen = next((line for rank in starved if (line := line_of_data(view, rank, starved[rank][0])) is not None), None)
    at = f", mostly at {seen.short}" if seen is not None else ""
    return [
        Finding(
            "data-starved",
            f"{ranks_do(starved, 'wait')} for data {upto}{share:.0%} of the time ({duration_text(typical)} a step){at}",
            tuple(starved),
            Confidence.CERTAIN,
            step=min(step for _, _, step, _ in starved.values()),
            evidence=(
                *(
                    {"what": "data time", "rank": r, "share": s, "median_seconds": t}
                    for r, (s, t, _, _) in sorted(starved.items())[:16]
                ),
                *([seen.evidence] if seen is not None else ()),
            ),
            since_ns=min(since for _, _, _, since in starved.values()),
        )
    ]
