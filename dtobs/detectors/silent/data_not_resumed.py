"""data-not-resumed: after a restart the loader begins at the beginning again.

What it does: the first steps after a restart are compared with the first steps of the attempt before. Where they read
the same samples, in the same order, and the attempt before had read others in the steps of these numbers, the place in
the data was not resumed. Constant and cyclic inputs prove nothing.

Why it hurts: the beginning of the data set is learned again and the rest of the epoch is left out, at every restart.
"""

from __future__ import annotations

import numpy as np

from dtobs.detectors.silent.restarts import LEAST_STEPS, redone
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import ranks_do


def data_not_resumed(view: RunView) -> list[Finding]:
    """One finding for all ranks that began their data anew."""
    found: dict[int, tuple[int, int]] = {}  # by rank: the step that went on, how many steps are as at the beginning
    for pair in redone(view):
        beginning, begun = pair.earlier["input_digest"], pair.begun["input_digest"]
        count = min(len(beginning), len(begun))
        from_the_start = int(pair.earlier["step"][0]) <= 1 < int(pair.begun["step"][0])
        if not from_the_start or count < LEAST_STEPS or len(pair.before) < 1:
            continue
        same = beginning[:count] == begun[:count]
        like_before = pair.before["input_digest"] == pair.after["input_digest"]
        varied = len(np.unique(begun[:count])) == count and (begun[:count] != 0).all()
        if varied and same.all() and not like_before.any():
            found[pair.rank] = (int(pair.begun["step"][0]), count)
    if not found:
        return []
    step, count = next(iter(found.values()))
    return [
        Finding(
            "data-not-resumed",
            f"{ranks_do(found, 'have')} gone on at step {step} with the data of step 0: {count} steps read what the"
            " first steps of the attempt before had read",
            tuple(found),
            Confidence.CERTAIN,
            step=step,
            evidence=({"what": "input digests as at the beginning", "steps": count, "attempt": view.attempt},),
        )
    ]
