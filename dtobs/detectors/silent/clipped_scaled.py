"""gradient-scale-mismatch: gradients are clipped while they are multiplied by the loss scale, or when it is too late.

What it does: reads on which ranks ``clip_grad_norm_`` came before the scaler divided the gradients by its scale, in
several steps, with a largest norm far below the scale (`probes.scaler`); and on which it came after the optimizer's
step and before the next backward, in step after step (`probes.kept_gradients`).

Why it hurts: the clipped gradients are divided by the scale afterwards. What reaches the optimizer is thousands of
times smaller than was wanted, and changes whenever the scale does; nothing raises, and training hardly moves. What is
clipped too late reaches the optimizer as large as it was.
"""

from __future__ import annotations

from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import ranks_do

_MOST = 16


def clipped_scaled(view: RunView) -> list[Finding]:
    """At most one finding of all ranks that clip scaled gradients, and one of those that clip what is not used."""
    return [*_scaled(view), *_idly(view)]


def _idly(view: RunView) -> list[Finding]:
    found: dict[int, tuple[int, float]] = {}
    for rank in view.ranks:
        match view.meta(rank).process.get("clipped_idly"):
            case [int(step), int() | float() as norm]:
                found[rank] = step, norm
    if not found:
        return []
    step, norm = min(found.values())
    return [
        Finding(
            "gradient-scale-mismatch",
            f"{ranks_do(found, 'clip')} gradients to a norm of {norm:g} after the optimizer's step and before the next"
            f" backward, in several steps up to step {step}: nothing that the optimizer uses is clipped",
            tuple(found),
            Confidence.LIKELY,
            step=step,
            group="clipped idly",
            next_step="Call clip_grad_norm_ between the last backward of a step and the optimizer's step.",
            evidence=tuple(
                {"what": "clipping that is not used", "rank": rank, "step": at, "max_norm": most}
                for rank, (at, most) in list(found.items())[:_MOST]
            ),
        )
    ]


def _scaled(view: RunView) -> list[Finding]:
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
