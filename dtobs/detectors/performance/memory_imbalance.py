"""memory-imbalance: a rank holds much more memory than the ranks that do the same work.

What it does: compares the peak of each rank's device, the median over recent steps, with the median of its
data-parallel peers: `RATIO` and `LEAST_BYTES` more, and at least `OF_DEVICE` of what the device has. Where ranks train
on the host, the same is asked of the resident memory that is theirs alone, without mapped files and shared memory.
A rank that leaks has more because of that, and is left to `memory-leak`.
Pipeline stages are not compared: the first one holds more activations in most schedules.

Why it hurts: the fullest device decides how large a micro-batch can be, and runs out of memory first.
"""

from __future__ import annotations

import numpy as np

from dtobs.detectors.peers import data_groups, rows_of
from dtobs.detectors.performance.memory_leak import leaking
from dtobs.detectors.performance.window import LEAST_STEPS, step_times
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import bytes_text, ranks_do

RATIO, LEAST_BYTES, OF_DEVICE = 1.25, 1 << 30, 0.10


def memory_imbalance(view: RunView) -> list[Finding]:
    """At most one finding for devices and one for hosts, each with all such ranks."""
    heavy: dict[str, dict[int, tuple[float, float]]] = {"device_peak_bytes": {}, "private_bytes": {}}
    step = 0
    for group in data_groups(view):
        rows = rows_of(view, group)
        times = step_times(view, rows)
        if times is None or len(times.steps) < LEAST_STEPS:
            continue
        # Of ranks that compute on devices some may not have begun to: then neither memory tells of all of them.
        known = [name for name in heavy if np.isfinite(times.records[name]).all()]
        for name in known[:1]:
            typical = np.median(times.records[name], axis=1)
            for member, rank in enumerate(group):
                others = float(np.median(np.delete(typical, member)))
                device = float(np.nan_to_num(view.pages[rows[member]]["device_total_bytes"]))
                more = float(typical[member]) - others
                if typical[member] >= RATIO * others and more >= max(LEAST_BYTES, OF_DEVICE * device):
                    heavy[name][rank], step = (more, others), int(times.steps[0])
    leaks = leaking(view) if any(heavy.values()) else set()
    kept = {name: {r: more for r, more in ranks.items() if r not in leaks} for name, ranks in heavy.items()}
    return [_finding(name, ranks, step) for name, ranks in kept.items() if ranks]


def _finding(field: str, heavy: dict[int, tuple[float, float]], step: int) -> Finding:
    more, others = max(heavy.values())
    where = "device" if field == "device_peak_bytes" else "host"
    return Finding(
        "memory-imbalance",
        f"{ranks_do(heavy, 'use')} up to {bytes_text(more)} more {where} memory than the {bytes_text(others)} of ranks"
        " that do the same work",
        tuple(heavy),
        Confidence.LIKELY,
        step=step,
        evidence=tuple(
            {"what": "memory against peers", "of": where, "rank": r, "bytes_more": m, "peers_bytes": o}
            for r, (m, o) in sorted(heavy.items())[:16]
        ),
    )
