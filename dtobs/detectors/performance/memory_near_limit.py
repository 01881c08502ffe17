"""memory-near-limit: a device's memory is nearly full at the peak of a step.

What it does: compares the largest peak of the recent steps that the allocator reports with what the device has. Cached
memory that nothing uses does not count.

Why it hurts: a longer sequence, a validation or a checkpoint ends the run with an out-of-memory error; before that the
allocator frees and takes segments again, which waits for the device.
"""

from __future__ import annotations

import numpy as np

from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import bytes_text, ranks_do

SHARE = 0.95
LAST = 16


def memory_near_limit(view: RunView) -> list[Finding]:
    """At most one finding, with all such ranks."""
    full: dict[int, tuple[float, float, int]] = {}
    for row, rank in enumerate(view.ranks):
        total = float(view.pages[row]["device_total_bytes"])
        steps = view.rank_steps(rank)[-LAST:]
        if total > 0 and len(steps):
            peaks = np.nan_to_num(steps["device_peak_bytes"])
            at = int(peaks.argmax())
            if peaks[at] >= SHARE * total:
                full[rank] = (float(peaks[at]), total, int(steps["step"][at]))
    if not full:
        return []
    peak, total, step = max(full.values())
    return [
        Finding(
            "memory-near-limit",
            f"{ranks_do(full, 'use')} up to {bytes_text(peak)} of the {bytes_text(total)} that their device has",
            tuple(full),
            Confidence.CERTAIN,
            step=step,
            evidence=tuple(
                {"what": "peak of a step", "rank": r, "bytes": p, "device_bytes": t, "step": s}
                for r, (p, t, s) in sorted(full.items())[:16]
            ),
        )
    ]
