"""rng-not-restored: a restart continues the data and not the random numbers.

What it does: where all steps that a restart does again read what they had read before, the job means to go on exactly.
The states of torch's generators at the end of those steps are then compared with those of the attempt before;
generators that do not move, because nothing draws from them, prove nothing. In a loop that counts its steps anew, only
numbers that the attempt before had drawn in earlier steps count: an iterator of a `DataLoader` draws one number when it
is made, so that restored generators are elsewhere too where a restart makes one in the midst of a pass. Where the data
goes on elsewhere than the optimizer, it is another step, and `data-not-resumed` says so.

Why it hurts: dropout and augmentation are others than in a run without the restart: the run cannot be repeated, and
every restart with a fixed seed draws the same numbers again.
"""

from __future__ import annotations

import numpy as np

from dtobs.detectors.silent.restarts import redone
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import ranks_text


def rng_not_restored(view: RunView) -> list[Finding]:
    """One finding for all ranks whose generators went on from another state."""
    found: dict[int, int] = {}
    for pair in redone(view):
        if pair.ahead or not pair.same_inputs():
            continue
        for name in ("rng_torch", "rng_device"):
            before, after = pair.before[name], pair.after[name]
            known = (before != 0).all() and (after != 0).all()
            moves = len(np.unique(before)) == len(before) and len(np.unique(after)) == len(after)
            drawn_again = np.isin(after, pair.earlier[name][pair.earlier["step"] < pair.before["step"][0]]).any()
            if known and moves and not (before == after).any() and (pair.numbered or drawn_again):
                found[pair.rank] = int(pair.after["step"][0])
    if not found:
        return []
    step = min(found.values())
    return [
        Finding(
            "rng-not-restored",
            f"the steps from {step} on, done again after a restart, read the same data with other random numbers on"
            f" {ranks_text(found)}",
            tuple(found),
            Confidence.LIKELY,
            step=step,
            evidence=({"what": "states of torch's generators in steps done again", "first_step": step},),
        )
    ]
