"""host-bound: the host keeps the computation waiting: it launches too slowly, collects garbage or has no core.

What it does: over many steps and seconds, on most ranks: a device had nothing left to do at `DRY` of the moments at
which it was asked, and neither data nor communication explain it; or Python collected garbage in `SHARE` of the time;
or the control group of the process had used up its processor time in `SHARE` of it.

Why it hurts: devices are idle although there is work.
"""

from __future__ import annotations

import numpy as np

from dtobs.detectors.performance.window import MOST_STEPS, Floats, Times, step_times
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import ranks_do

DRY, LEAST_MARKS = 0.75, 64
SHARE = 0.10
WAITING = 0.10
_REASONS = {
    "launches": (
        "have devices that run out of work in {share:.0%} of the moments looked at: the host launches too slowly",
        "Use torch.compile or CUDA graphs, larger micro-batches, and no `.item()` or `.cpu()` inside the loop.",
    ),
    "garbage": (
        "collect garbage in {share:.0%} of the time",
        "Call gc.freeze() before the loop, gc.disable(), and gc.collect() every so many steps on all ranks at once.",
    ),
    "quota": (
        "have used up the processor time of their container in {share:.0%} of the time",
        "Give the container a larger CPU limit, or run fewer threads (OMP_NUM_THREADS, loader workers).",
    ),
}


def host_bound(view: RunView) -> list[Finding]:
    """At most one finding: the reason that takes most on most ranks."""
    times = step_times(view, list(range(len(view.ranks))), last=MOST_STEPS)
    if times is None or not times.settled:
        return []
    shares = {"launches": _dry(times), "garbage": _share(times, "gc"), "quota": _share(times, "throttled")}
    least = {"launches": DRY, "garbage": SHARE, "quota": SHARE}
    found = {
        name: [r for r, s in zip(view.ranks, share, strict=True) if s >= least[name]] for name, share in shares.items()
    }
    reasons = [name for name in shares if 2 * len(found[name]) > len(view.ranks)]
    if not reasons:
        return []
    reason = max(reasons, key=lambda name: float(np.median(shares[name])))
    share = float(np.median([s for s in shares[reason] if s >= least[reason]]))
    words, advice = _REASONS[reason]
    base, _, rest = words.partition(" ")
    return [
        Finding(
            "host-bound",
            f"{ranks_do(found[reason], base)} {rest.format(share=share)}",
            tuple(found[reason]),
            Confidence.LIKELY,
            step=int(times.steps[0]),
            evidence=({"what": "host", "reason": reason, "share": share, "steps": len(times.steps)},),
            next_step=advice,
            since_ns=int(times.end_ns[0, 0]),
        )
    ]


def _share(times: Times, name: str) -> Floats:
    """float64[ranks]: of the time of all steps; what was throttled on several cores at once counts once."""
    wall = np.maximum(times.wall.sum(axis=1), 1e-9)
    share: Floats = np.minimum(times.seconds(name).sum(axis=1) / wall, 1.0)
    return share


def _dry(times: Times) -> Floats:
    """float64[ranks]: how often a device had no work left; 0 where something else kept it waiting, or nobody asked."""
    asked = times.records["device_marks"].sum(axis=1)
    dry = times.records["device_idle_marks"].sum(axis=1) / np.maximum(asked, 1)
    waits = (times.parts["data"] + times.parts["exposed"]).sum(axis=1) / np.maximum(times.wall.sum(axis=1), 1e-9)
    found: Floats = np.where((asked >= LEAST_MARKS) & (waits < WAITING), dry, 0.0)
    return found
