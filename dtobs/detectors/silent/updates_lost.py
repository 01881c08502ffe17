"""updates-lost: nearly all that the optimizer adds is less than the parameters' format can hold.

What it does: computes from the moments what each step should add to a window of a parameter (`audit`). Where, over at
least `LEAST_LOOKS` windows with a learning rate of at least half its largest, in more than half nothing moves because
every addition is below half a unit in the last place, the training stands still without a sign of it; `FEW_LOOKS` are
enough where nothing moves in any. Single tensors that do (a norm's weight near 1 in BF16) are common and left alone,
and nothing is said while the learning rate still rises.

Why it hurts: the job costs what it costs and learns next to nothing.
"""

from __future__ import annotations

import numpy as np

from dtobs.detectors.silent.audit import audits
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import ranks_text

LEAST_LOOKS, FEW_LOOKS = 16, 8
MOST = 0.5


def updates_lost(view: RunView) -> list[Finding]:
    """One finding for all ranks that lose most of their updates."""
    struck: dict[int, tuple[float, int, str]] = {}
    for audit in audits(view):
        rate = audit.records["lr"]
        if not audit.kind or not np.isfinite(rate).any():
            continue
        full = rate >= 0.5 * np.nanmax(rate)
        if rate[-1] > np.nanmax(rate[:-FEW_LOOKS], initial=0.0):
            continue  # it rises
        share, looks = audit.lost[full].mean(), full.sum()
        if (looks >= LEAST_LOOKS and share > MOST) or (looks >= FEW_LOOKS and share == 1.0):
            first = int(np.flatnonzero(audit.lost & full)[0])
            struck[audit.rank] = float(share), int(audit.records["step"][first]), audit.dtypes[0]
    if not struck:
        return []
    share, step, dtype = struck[min(struck)]
    return [
        Finding(
            "updates-lost",
            f"{share:.0%} of the updates looked at on {ranks_text(struck)} are lost to rounding in {dtype}: each is"
            " below half a unit in the last place of what it is added to",
            tuple(struck),
            Confidence.CERTAIN,
            step=step,
            evidence=({"what": "update audit", "lost": {str(r): s for r, (s, *_) in list(struck.items())[:16]}},),
        )
    ]
