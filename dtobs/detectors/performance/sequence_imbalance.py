"""sequence-imbalance: ranks take turns in being late, because each has the longest sequences now and then.

What it does: compares the ranks of a data-parallel group step by step. The slowest one costs the others `LOST` of the
time, it is a different one from step to step, and it works long where its inputs are: busy time without data and the
number of elements of a rank's inputs, both against the mean of the step, go together (`CORRELATED`). Without
inputs of different sizes nothing is said: `dtobs whatif` sees sequences that are packed to one length, from forward
and backward of single micro-batches.

Why it hurts: all ranks wait for the longest sequence of each step.
"""

from __future__ import annotations

import numpy as np

from dtobs.detectors.peers import data_groups, rows_of
from dtobs.detectors.performance.window import MOST_STEPS, Floats, step_times
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import duration_text

LOST, CORRELATED, UNEVEN = 0.15, 0.8, 0.05
MOST_OFTEN = 0.8
"""The share of the loss that one rank may cause by itself."""
LEAST_SECONDS = 0.001


def sequence_imbalance(view: RunView) -> list[Finding]:
    """At most one finding a group of data-parallel ranks."""
    found = []
    for group in data_groups(view):
        times = step_times(view, rows_of(view, group), last=MOST_STEPS)
        if times is None or not times.settled or times.overloaded:
            continue
        # A loop by hand may compute in what is no forward of a module.
        work = times.busy - times.parts["data"] - times.parts["compile"]
        sizes = times.records["input_elements"].astype(np.float64)
        if not (sizes > 0).all():
            continue
        lost = work.max(axis=0) - work.mean(axis=0)
        share = float(lost.sum() / max(float(np.median(times.wall, axis=0).sum()), 1e-9))
        often = float(np.bincount(work.argmax(axis=0), lost).max() / max(float(lost.sum()), 1e-9))
        uneven = float((sizes / sizes.mean(axis=0)).std())
        together = _together(work, sizes)
        if share < LOST or float(lost.mean()) < LEAST_SECONDS or often > MOST_OFTEN:
            continue
        if uneven < UNEVEN or together < CORRELATED:
            continue
        found.append(
            Finding(
                "sequence-imbalance",
                f"the rank with the largest inputs of a step, each time another one, makes the others wait"
                f" {duration_text(float(lost.mean()))} a step: {share:.0%} of the time is lost to it",
                tuple(group),
                Confidence.LIKELY,
                step=int(times.steps[0]),
                evidence=(
                    {
                        "what": "busy time against the size of the inputs",
                        "correlation": together,
                        "lost_share": share,
                        "spread_of_sizes": uneven,
                        "steps": len(times.steps),
                    },
                ),
                since_ns=int(times.end_ns[0, 0]),
            )
        )
    return found


def _together(work: Floats, sizes: Floats) -> float:
    """The correlation of two quantities over ranks and steps, each against the mean of its step."""
    one, other = ((v / np.maximum(v.mean(axis=0), 1e-9) - 1).reshape(-1) for v in (work, sizes))
    if one.std() < 1e-9 or other.std() < 1e-9:
        return 0.0
    return float(np.corrcoef(one, other)[0, 1])
