"""accumulation-not-normalized: gradients are never zeroed, so each step trains on all gradients that ever were.

What it does: reads on which ranks the gradient of one optimizer step was still there at the next backward, several
steps in a row (`probes.kept_gradients`).

Why it hurts: the loss may still fall, of steps that grow in length and point where gradients pointed long ago. Where
only some ranks zero theirs, the others' old gradients go into every average.
"""

from __future__ import annotations

from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import ranks_do

_MOST = 16


def gradients_kept(view: RunView) -> list[Finding]:
    """At most one finding, of all ranks that keep their gradients."""
    kept = {rank: said for rank in view.ranks if (said := view.meta(rank).kept)}
    if not kept:
        return []
    step, name = min(entry for said in kept.values() for entry in said)
    others = len(view.ranks) - len(kept)
    alone = " (the others do)" if others else ""
    which = f", seen in {name}" if name else ""
    return [
        Finding(
            "accumulation-not-normalized",
            f"{ranks_do(kept, 'do')} not zero the gradients{alone}: those of one optimizer step are still there at the"
            f" next backward, several steps in a row up to step {step}{which}",
            tuple(kept),
            Confidence.LIKELY,
            step=step,
            fault=True,
            evidence=tuple(
                {"what": "kept gradient", "rank": rank, "step": said[0][0], "parameter": said[0][1]}
                for rank, said in list(kept.items())[:_MOST]
            ),
        )
    ]
