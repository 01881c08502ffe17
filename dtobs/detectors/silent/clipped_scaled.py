"""gradient-scale-mismatch: gradients are clipped while the loss scale is in them, or too late, or not summed.

What it does: reads on which ranks ``clip_grad_norm_`` came before the scaler divided the gradients by its scale, in
several steps, with a largest norm far below the scale (`probes.scaler`); and on which it came after the optimizer's
step and before the next backward, in step after step (`probes.kept_gradients`). And on which ranks gradients are
all-reduced by their maximum, minimum or product before the first steps (`probes.reductions`).

Why it hurts: the clipped gradients are divided by the scale afterwards. What reaches the optimizer is thousands of
times smaller than was wanted, and changes whenever the scale does; nothing raises, and training hardly moves. What is
clipped too late reaches the optimizer as large as it was. The largest of the ranks' gradients, element by element, is
the gradient of no loss.
"""

from __future__ import annotations

from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import ranks_do

_MOST = 16


def clipped_scaled(view: RunView) -> list[Finding]:
    """At most one finding of all ranks that clip scaled gradients, that clip what is not used, or that do not sum."""
    return [*_scaled(view), *_idly(view), *_not_summed(view)]


def _not_summed(view: RunView) -> list[Finding]:
    found: dict[int, tuple[int, str, str]] = {}
    for rank in view.ranks:
        match view.meta(rank).process.get("reduced_otherwise"):
            case [int(step), str(operation), str(parameter)]:
                found[rank] = step, operation, parameter
    if not found:
        return []
    _, operation, parameter = min(found.values())
    return [
        Finding(
            "gradient-scale-mismatch",
            f"{ranks_do(found, 'reduce')} gradients by {operation}, element by element, instead of a sum or an average:"
            f" that of {parameter} in each of the first steps",
            tuple(found),
            Confidence.LIKELY,
            step=1,
            aspect="not summed",
            next_step="Give all_reduce op=ReduceOp.SUM and divide by the ranks, or op=ReduceOp.AVG.",
            evidence=tuple(
                {"what": "gradients reduced otherwise", "rank": rank, "operation": name, "parameter": of}
                for rank, (_, name, of) in list(found.items())[:_MOST]
            ),
        )
    ]


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
            aspect="clipped idly",
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
            aspect="clipped while scaled",
            evidence=tuple(
                {"what": "clipping of scaled gradients", "rank": rank, "step": at, "max_norm": most, "scale": by}
                for rank, (at, most, by) in list(found.items())[:_MOST]
            ),
        )
    ]
