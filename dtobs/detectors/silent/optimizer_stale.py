"""optimizer-stale: gradients arrive, the optimizer steps, and no parameter changes.

What it does: looks at the digests of all parameters after each step of the optimizer. Where not one of them has changed
over `STEPS` steps, although each had a gradient that is finite and not zero and a learning rate above zero, the
optimizer holds other tensors than the model, or every update is lost to rounding. A model of which some part trains is
left alone: what is frozen is frozen.

Why it hurts: nothing is learnt, and the loss looks like that of a hard problem.

What to do next: make the optimizer after the model was moved, wrapped and loaded, from that model's parameters; in BF16
keep FP32 master weights, or raise the learning rate.
"""

from __future__ import annotations

import numpy as np

from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import ranks_text

STEPS = 6
"""Steps of the optimizer without any change."""


def optimizer_stale(view: RunView) -> list[Finding]:
    """At most one finding, over all ranks whose parameters rest."""
    stale = {rank: steps for rank in view.ranks if (steps := _resting(view, rank))}
    if not stale:
        return []
    first = min(steps[0] for steps in stale.values())
    looks = min(len(steps) for steps in stale.values())
    return [
        Finding(
            "optimizer-stale",
            f"no parameter of {ranks_text(stale)} has changed since step {first}, over {looks} looked-at steps of the"
            " optimizer that had a gradient and a learning rate: it holds other tensors than the model, or its"
            " updates are lost to rounding",
            tuple(stale),
            Confidence.CERTAIN if len(stale) == len(view.ranks) else Confidence.LIKELY,
            step=first,
            evidence=tuple(
                {"what": "parameter digests", "rank": rank, "unchanged_after_steps": steps[:16]}
                for rank, steps in list(stale.items())[:16]
            ),
        )
    ]


def _resting(view: RunView, rank: int) -> list[int]:
    """The steps after which all parameters of `rank` still were what they were at the oldest look; [] if any moved."""
    digests, steps = view.digests(rank), view.rank_steps(rank)
    if len(digests) <= STEPS or "digest" not in (digests.dtype.names or ()) or not digests["digest"].shape[1]:
        return []
    if (digests["digest"] != digests["digest"][:1]).any():
        return []
    with np.errstate(invalid="ignore"):
        norm = np.where(np.isfinite(steps["local_norm"]), steps["local_norm"], steps["sample_norm"])
        alive = (norm > 0) & np.isfinite(norm) & (steps["learning_rate"] > 0) & (steps["nonfinite"] == 0)
    moved = np.intersect1d(steps["step"][alive], digests["step"])
    return [int(step) for step in moved] if len(moved) >= STEPS else []
