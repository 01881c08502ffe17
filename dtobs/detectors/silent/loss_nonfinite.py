"""loss-nonfinite: a rank's loss is NaN or infinity.

What it does: looks at the losses that the loop reports; names the ranks of the first bad step. Steps without a report
say nothing. A loss that follows a non-finite gradient of an earlier step is its consequence and not reported.

Why it hurts: the step teaches nothing, and unless it is skipped the model is lost.
"""

from __future__ import annotations

import numpy as np

from dtobs.detectors.silent.gradient_nonfinite import gradient_nonfinite, in_the_forward
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import ranks_do


def loss_nonfinite(view: RunView) -> list[Finding]:
    """At most one finding: the first bad step in the history."""
    first: dict[int, tuple[int, float, int]] = {}
    for rank in view.ranks:
        steps = view.rank_steps(rank)
        bad = steps[(steps["losses"] > 0) & ~np.isfinite(steps["loss"])]
        if len(bad):
            first[rank] = (int(bad["step"][0]), float(bad["loss"][0]), int(bad["end_ns"][0]))
    if not first:
        return []
    step = min(at for at, _, _ in first.values())
    if any(((h := view.rank_steps(r))["nonfinite"][h["step"] < step] > 0).any() for r in view.ranks):
        return []
    if any(finding.step is not None and finding.step < step for finding in gradient_nonfinite(view)):
        return []
    ranks = [r for r, (at, _, _) in first.items() if at == step]
    where = in_the_forward(view, ranks[0], step)
    return [
        Finding(
            "loss-nonfinite",
            f"{ranks_do(ranks, 'have')} a loss of {first[ranks[0]][1]} in step {step}{where}",
            tuple(ranks),
            Confidence.CERTAIN,
            step=step,
            evidence=tuple({"what": "loss", "rank": r, "step": step, "loss": str(first[r][1])} for r in ranks[:16]),
            since_ns=min(first[r][2] for r in ranks),
        )
    ]
