"""recomputation-mismatch: what a backward computes again for activation checkpointing is not what its forward had.

What it does: reads on which ranks values came out otherwise in at least two steps (`probes.recomputation`).

Why it hurts: gradients are those of a forward that never was, with other units dropped than those that made the loss.
Training goes on, worse than it would.
"""

from __future__ import annotations

from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import ranks_do

LEAST = 2
_MOST = 16


def recomputation_mismatch(view: RunView) -> list[Finding]:
    """At most one finding, of all ranks."""
    seen = {rank: said for rank in view.ranks if len(said := view.meta(rank).recomputed) >= LEAST}
    if not seen:
        return []
    first = min((each for said in seen.values() for each in said), key=lambda each: each.step)
    where = f" {first.region}" if first.region else " a checkpointed region"
    why = "" if first.preserved else ": checkpoint() is told not to preserve the state of the random generators"
    return [
        Finding(
            "recomputation-mismatch",
            f"{ranks_do(seen, 'compute')}{where} again in the backward with other values than in the forward, seen"
            f" since step {first.step}{why}",
            tuple(seen),
            Confidence.CERTAIN,
            step=first.step,
            fault=True,
            evidence=tuple(
                {
                    "what": "recomputed",
                    "rank": rank,
                    "step": each.step,
                    "region": each.region,
                    "difference": each.difference,
                }
                for rank, said in list(seen.items())[:_MOST]
                for each in said[:1]
            ),
        )
    ]
