"""exposed-communication: every rank waits a good part of each step for data that is on its way.

What it does: takes, step by step, how long the rank that waits least has waited: whoever comes last to a collective
waits for the transfer alone, so that waiting for a late rank does not count. The finding comes when that is `SHARE` of
the time and at least `LEAST_SECONDS` in the median step, over many steps and seconds, on a machine that has a core for
each rank. Where ranks lack a core now and then, `TURN_SECONDS` a call are not counted.

Why it hurts: nothing is computed meanwhile, on any rank.
"""

from __future__ import annotations

import numpy as np

from dtobs.detectors.performance.window import MOST_STEPS, Times, step_times
from dtobs.events import EXPOSED_ALONG
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import bytes_text, duration_text

SHARE, LEAST_SECONDS = 0.30, 0.02
TURN_SECONDS = 0.02
"""What a call may wait for a core of its sender and its receiver, where others want those cores as well."""
_ADVICE = {
    "data": "Reduce gradients once a step (no_sync), in larger buckets or in BF16, and let the backward overlap it.",
    "shard": "Shard within a machine and replicate between them (HSDP), prefetch further ahead, or reduce in BF16.",
    "tensor": "Keep tensor parallel within one machine and its fastest links, or use less of it.",
    "context": "Overlap the exchange of keys and values with attention, or use less context parallel.",
    "expert": "Keep experts within one machine, or exchange in a narrower format.",
}


def exposed_communication(view: RunView) -> list[Finding]:
    """At most one finding, of the whole run."""
    times = step_times(view, list(range(len(view.ranks))), last=MOST_STEPS)
    if times is None or len(view.ranks) < 2 or not times.settled or times.overloaded:
        return []
    along = _transfers(times)
    total = sum(along.values(), np.zeros(len(times.steps)))
    if times.crowded:
        total = np.maximum(0.0, total - TURN_SECONDS * np.median(times.records["collectives"], axis=0))
    wall = np.median(times.wall, axis=0)
    share, typical = float(np.median(total / np.maximum(wall, 1e-9))), float(np.median(total))
    if share < SHARE or typical < LEAST_SECONDS or float(total.sum() / wall.sum()) < SHARE:
        return []
    medians = {name: float(np.median(seconds)) for name, seconds in along.items()}
    worst = max(medians, key=lambda name: medians[name])
    moved = float(np.nanmedian(times.records["collective_bytes"]))
    return [
        Finding(
            "exposed-communication",
            f"every rank waits at least {share:.0%} of each step ({duration_text(typical)}) for communication that"
            f" nothing hides, most of it along {worst} ({bytes_text(moved)} a step and rank)",
            tuple(view.ranks),
            Confidence.LIKELY,
            step=int(times.steps[0]),
            evidence=(
                {"what": "least wait of any rank", "steps": len(times.steps), "seconds": typical, "share": share},
                {"what": "by dimension", **{name: value for name, value in medians.items() if value > 0}},
            ),
            next_step=_ADVICE.get(worst, ""),
            since_ns=int(times.end_ns[0, 0]),
        )
    ]


def _transfers(times: Times) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """By dimension, the least that any rank has waited in each step; pipelines wait for computation."""
    found = {name: times.seconds(f"exposed_{name}").min(axis=0) for name in EXPOSED_ALONG if name != "pipeline"}
    known = sum((times.seconds(f"exposed_{name}") for name in EXPOSED_ALONG), np.zeros(times.wall.shape))
    found["a group of no name"] = np.maximum(0.0, times.parts["exposed"] - known).min(axis=0)
    return found
