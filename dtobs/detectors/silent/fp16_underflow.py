"""fp16-underflow: gradients are lost because FP16 cannot hold numbers as small as they are.

What it does: reads the loss scale that the training reports, and where it reports it the share of zeros in a sample of
its gradients. A scale that has come down by `FALL` times or more and stayed at one or below for `STEPS` steps protects
no more. So does a scale that leaves `ZEROS` of the gradients zero in `SAMPLES` samples in a row. That a scale halves
now and then is how it is found, and a scale that has always been one belongs to a scaler that is switched off.

Why it hurts: parameters whose gradients vanish stop learning, without an error and often without a visible loss.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import ranks_text

STEPS = 10
FALL = 16.0
ZEROS, SAMPLES = 0.5, 3


def fp16_underflow(view: RunView) -> list[Finding]:
    """At most one finding for the collapsed scale and one for the zeros, each with all ranks that show it."""
    collapsed, vanished = {}, {}
    for rank in view.ranks:
        steps = view.rank_steps(rank)
        scaled = steps[np.isfinite(steps["loss_scale"])]
        if _has_collapsed(scaled["loss_scale"]):
            collapsed[rank] = scaled[-STEPS]
        sampled = steps[np.isfinite(steps["gradient_zeros"])][-SAMPLES:]
        if len(sampled) == SAMPLES and (sampled["gradient_zeros"] >= ZEROS).all():
            vanished[rank] = sampled[-1]
    found = []
    if collapsed:
        first = min(collapsed.values(), key=lambda record: int(record["step"]))
        found.append(
            _finding(
                collapsed,
                f"the loss scale of {ranks_text(list(collapsed))} fell to {_last(view, collapsed):g} and stays there",
                int(first["step"]),
            )
        )
    if vanished:
        worst = max(vanished.values(), key=lambda record: float(record["gradient_zeros"]))
        found.append(
            _finding(
                vanished,
                f"{float(worst['gradient_zeros']):.0%} of the sampled gradients of {ranks_text(vanished)} are zero",
                int(worst["step"]),
            )
        )
    return found


def _has_collapsed(scales: npt.NDArray[np.float64]) -> bool:
    if len(scales) < STEPS or (scales[-STEPS:] > 1).any():
        return False
    return bool(scales.max() >= FALL * max(float(scales[-1]), 1e-30))


def _last(view: RunView, ranks: dict[int, npt.NDArray[np.void]]) -> float:
    scales = view.rank_steps(min(ranks))["loss_scale"]
    return float(scales[np.isfinite(scales)][-1])


def _finding(ranks: dict[int, npt.NDArray[np.void]], summary: str, step: int) -> Finding:
    evidence = [
        {
            "what": "FP16",
            "rank": rank,
            "step": int(record["step"]),
            "loss_scale": _number(record["loss_scale"]),
            "gradient_zeros": _number(record["gradient_zeros"]),
        }
        for rank, record in sorted(ranks.items())[:16]
    ]
    return Finding(
        "fp16-underflow",
        summary,
        tuple(ranks),
        Confidence.LIKELY,
        step=step,
        evidence=tuple(evidence),
        since_ns=min(int(record["end_ns"]) for record in ranks.values()),
    )


def _number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None
