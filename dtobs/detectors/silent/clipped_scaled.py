"""gradient-scale-mismatch: gradients are clipped while they are still multiplied by the loss scale.

What it does: reads on which ranks ``clip_grad_norm_`` came before the scaler divided the gradients by its scale, in
several steps, with a largest norm far below the scale (`probes.scaler`).

Why it hurts: the clipped gradients are divided by the scale afterwards. What reaches the optimizer is thousands of
times smaller than was wanted, and changes whenever the scale does; nothing raises, and training hardly moves.
"""

from __future__ import annotations

from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import ranks_do

_MOST = 16


def clipped_scaled(view: RunView) -> list[Finding]:
    """At most one finding, of all ranks that clip scaled gradients."""
    found: dict[int, tuple[int, float, float]] = {}
    for rank in view.ranks:
        match view.meta(rank).process.get("clipped_scaled"):
            case [int(step), int() | float() as norm, int() | float() as scale]:
                found[rank] = step, norm, scale
    if not found:
        return []
    step, norm, scale = min(found.values())
    return [
        Finding(
            "gradient-scale-mismatch",
            f"{ranks_do(found, 'clip')} gradients to a norm of {norm:g} before the loss scale of {scale:g} is taken out"
            f" of them, in several steps up to step {step}: the optimizer gets a norm of at most {norm / scale:.2g}",
            tuple(found),
            Confidence.LIKELY,
            step=step,
            group="clipped while scaled",
            evidence=tuple(
                {"what": "clipping of scaled gradients", "rank": rank, "step": at, "max_norm": most, "scale": by}
                for rank, (at, most, by) in list(found.items())[:_MOST]
            ),
        )
    ]
