"""fp8-saturation: numbers are lost because FP8 cannot hold them at the scale they are given.

What it does: reads the shares that the training reports of its sampled layers, for inputs, weights and gradients. A
role is named when at least `SATURATED` of its elements lie beyond what the format reaches, or at least `FLUSHED` become
zero, in `SAMPLES` samples in a row of one rank: a tensor's largest element is scaled to the edge in every healthy step,
and small numbers beside it may vanish.

Why it hurts: clipped numbers bias every product; numbers turned into zero do not take part. The loss then stalls or
drifts away from what the same training does in BF16, without an error.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dtobs.events import FP8_ROLES
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import ranks_text

SAMPLES = 3
SATURATED, FLUSHED = 0.01, 0.5
_LIMITS = (("saturated", SATURATED, "saturate"), ("flushed", FLUSHED, "become zero"))


def fp8_saturation(view: RunView) -> list[Finding]:
    """One finding for each role and way to lose numbers, with all ranks that show it; the worst first."""
    found: list[tuple[float, Finding]] = []
    for role in FP8_ROLES:
        for way, limit, verb in _LIMITS:
            ranks = {}
            for rank in view.ranks:
                record = _lasting(view.rank_steps(rank), f"fp8_{way}_{role}", limit)
                if record is not None:
                    ranks[rank] = record
            if ranks:
                share = max(float(record[f"fp8_{way}_{role}"]) for record in ranks.values())
                found.append((share, _describe(role, way, verb, share, ranks)))
    return [finding for _, finding in sorted(found, key=lambda pair: -pair[0])]


def _lasting(steps: npt.NDArray[np.void], field: str, limit: float) -> npt.NDArray[np.void] | None:
    """The last sample, where it and the ones before it are at the limit or beyond."""
    sampled = steps[np.isfinite(steps[field])][-SAMPLES:]
    if len(sampled) < SAMPLES or (sampled[field] < limit).any():
        return None
    last: npt.NDArray[np.void] = sampled[-1]
    return last


def _describe(role: str, way: str, verb: str, share: float, ranks: dict[int, npt.NDArray[np.void]]) -> Finding:
    evidence = [
        {
            "what": f"FP8 {role}",
            "rank": rank,
            "step": int(record["step"]),
            way: float(record[f"fp8_{way}_{role}"]),
            "amax": float(record[f"fp8_amax_{role}"]) if np.isfinite(record[f"fp8_amax_{role}"]) else None,
        }
        for rank, record in sorted(ranks.items())[:16]
    ]
    return Finding(
        "fp8-saturation",
        f"{share:.0%} of the FP8 {role}s of {ranks_text(list(ranks))} {verb} in the sampled layers",
        tuple(ranks),
        Confidence.LIKELY,
        step=max(int(record["step"]) for record in ranks.values()),
        aspect=f"{role} {way}",
        evidence=tuple(evidence),
        since_ns=min(int(record["end_ns"]) for record in ranks.values()),
    )
