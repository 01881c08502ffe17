"""data-starved: steps spend a good part of their time waiting for data.

What it does: adds up the time of the data phase over the recent steps, without the first ones of the attempt. A rank
is starved when data takes `SHARE` of the time in total and in the median round of steps, and at least `LEAST_SECONDS` a
step (a toy model's step is all overhead). A round has a step for each of the loader's workers: the first one waits for
all. Ranks that merely wait for a starved one do not count, but those do whose loader workers take as long for a batch:
they will wait as soon as the first one does not.

Why it hurts: the accelerator is idle meanwhile, on all ranks of the job.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dtobs.detectors.peers import data_groups
from dtobs.detectors.performance.lines import line_of_data
from dtobs.detectors.performance.loaders import LoaderPace, as_slow, batches_a_step, pace_of
from dtobs.detectors.performance.window import LAST, MOST_STEPS, step_times
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import count, duration_text, ranks_do, ranks_text

LEAST_STEPS = 12
ROUND, LEAST_ROUNDS = 8, 3
"""Steps of a round where nobody knows how many workers there are, and how many rounds tell more than steps do."""
SHARE = 0.25
LEAST_SECONDS = 0.02
MOST_WORKERS = 64


@dataclass(frozen=True)
class _Starved:
    """A rank that waits for data a `share` of its time, `seconds` a step, and computes `computing` seconds a batch."""

    share: float
    seconds: float
    computing: float
    as_slow: list[int]
    step: int
    since_ns: int

    def advice(self, pace: LoaderPace | None) -> str:
        """How many workers would keep up; nothing where that is not known."""
        if pace is None or pace.period <= self.computing:
            return ""
        needed = math.ceil(1.1 * pace.seconds / max(self.computing, 1e-3))
        enough = f"about {count(needed, 'worker')}" if needed <= MOST_WORKERS else "no number of workers"
        takes = (
            f"A batch takes a loader worker {duration_text(pace.seconds)}, the training {duration_text(self.computing)}"
        )
        return (
            f"{takes}: {enough} a rank would keep up, where there are {pace.workers}. Make samples cheaper (decode and"
            " tokenise ahead of time), or give each rank more workers and the host the cores for them."
        )


def data_starved(view: RunView) -> list[Finding]:
    """At most one finding, with all starved ranks."""
    starved: dict[int, _Starved] = {}
    groups = {rank: group for group in data_groups(view) for rank in group}
    for row, rank in enumerate(view.ranks):
        size = pace.workers if (pace := pace_of(view, rank)) is not None else ROUND
        times = step_times(view, [row], last=min(MOST_STEPS, max(LAST, LEAST_ROUNDS * size)))
        if times is None or len(times.steps) < LEAST_STEPS:
            continue
        data, wall = times.parts["data"][0], times.wall[0]
        share = float(data.sum() / max(float(wall.sum()), 1e-9))
        rounds = times.by_round(size if len(times.steps) >= LEAST_ROUNDS * size else 1)
        data, wall = rounds.parts["data"][0], rounds.wall[0]
        typical = float(np.median(data))
        if share >= SHARE and float(np.median(data / np.maximum(wall, 1e-9))) >= SHARE and typical >= LEAST_SECONDS:
            without = float(np.median(wall - data)) / batches_a_step(rounds, 0)
            like_it = as_slow(view, rank, groups.get(rank, []), rounds, 0)
            starved[rank] = _Starved(share, typical, without, like_it, int(times.steps[0]), int(times.end_ns[0, 0]))
    if not starved:
        return []
    worst = max(starved, key=lambda r: (starved[r].share, -r))
    upto = "up to " if len(starved) > 1 else ""
    seen = next((line for rank in starved if (line := line_of_data(view, rank, starved[rank].share)) is not None), None)
    at = f", mostly at {seen.short}" if seen is not None else ""
    beside = sorted({other for one in starved.values() for other in one.as_slow} - starved.keys())
    too = f"; the loader workers of {ranks_text(beside)} take as long for a batch" if beside else ""
    most = starved[worst]
    paces = {rank: pace for rank in (*starved, *beside) if (pace := pace_of(view, rank)) is not None}
    return [
        Finding(
            "data-starved",
            f"{ranks_do(starved, 'wait')} for data {upto}{most.share:.0%} of the time"
            f" ({duration_text(most.seconds)} a step){at}{too}",
            (*starved, *beside),
            Confidence.CERTAIN,
            step=min(one.step for one in starved.values()),
            evidence=(
                *(
                    {"what": "data time", "rank": r, "share": one.share, "median_seconds": one.seconds}
                    for r, one in sorted(starved.items())[:16]
                ),
                *(
                    {"what": "loader workers", "rank": r, "workers": pace.workers, "seconds_a_batch": pace.seconds}
                    for r, pace in sorted(paces.items())[:16]
                ),
                *([seen.evidence] if seen is not None else ()),
            ),
            next_step=most.advice(paces.get(worst)),
            since_ns=min(one.since_ns for one in starved.values()),
        )
    ]
