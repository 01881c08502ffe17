"""memory-leak: what a rank holds at the end of a step grows with every step, without an end.

What it does: takes the device's allocated bytes after each step, past the warm-up, in `WINDOWS` windows. A leak grows
from each window to the next, by `GROWTH` and `LEAST_BYTES` in all, and in the second half still by most of what it grew
in the first: caches, longer sequences and a first validation level off. Where ranks train on the host, the same is
asked of the resident memory that is theirs alone, without mapped files and shared memory; because a cache of the data
also grows for a whole epoch there, only a rank is named that grows by `HOST_BYTES`, and `ALONE` times as fast as the
ranks that do the same work.

Why it hurts: the run ends with an out-of-memory error, hours later.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dtobs.detectors.peers import data_groups
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import bytes_text, ranks_do

WARM_UP, LEAST_STEPS = 8, 96
WINDOWS = 12
GROWTH, LEAST_BYTES, HOST_BYTES = 0.05, 64 << 20, 512 << 20
STEADY, ALONE = 0.6, 4.0


@dataclass(frozen=True)
class _Growth:
    """Bytes a step, since which step, and whether it is that of a leak."""

    rate: float
    step: int
    leaks: bool


def memory_leak(view: RunView) -> list[Finding]:
    """At most one finding for devices and one for hosts, each with all leaking ranks."""
    device, host = _leaking(view)
    found = ((device, "device", Confidence.LIKELY), (host, "host", Confidence.POSSIBLE))
    return [_finding(leaking, where, confidence) for leaking, where, confidence in found if leaking]


def leaking(view: RunView) -> set[int]:
    """The ranks whose memory grows without an end: what such a rank has more than its peers is the leak's."""
    return {rank for found in _leaking(view) for rank in found}


def _leaking(view: RunView) -> tuple[dict[int, _Growth], dict[int, _Growth]]:
    """Of devices and of hosts."""
    steps = {rank: view.rank_steps(rank)[WARM_UP:] for rank in view.ranks}
    grown = {rank: _growth(records, "device_bytes", LEAST_BYTES) for rank, records in steps.items()}
    device = {rank: growth for rank, growth in grown.items() if growth is not None and growth.leaks}
    host: dict[int, _Growth] = {}
    for group in data_groups(view):
        of_group = {rank: _growth(steps[rank], "private_bytes", HOST_BYTES) for rank in group}
        for rank, growth in of_group.items():
            if growth is None or not growth.leaks:
                continue
            peers = [other.rate for r, other in of_group.items() if r != rank and other is not None]
            if len(peers) == len(group) - 1 > 0 and growth.rate >= ALONE * statistics.median(peers):
                host[rank] = growth
    return device, host


def _growth(steps: npt.NDArray[np.void], field: str, least: int) -> _Growth | None:
    """How a field of a rank's steps grows; None where they are too few or do not have it."""
    held = steps[field].astype(np.float64)
    if len(steps) < LEAST_STEPS or not np.isfinite(held).all():
        return None
    # The least of a window: what one step holds and the next does not is no leak.
    levels = np.array([window.min() for window in np.array_split(held, WINDOWS)])
    total = float(levels[-1] - levels[0])
    halves = float(levels[WINDOWS // 2] - levels[0]), float(levels[-1] - levels[WINDOWS // 2 - 1])
    steady = bool((np.diff(levels) > 0).all()) and halves[1] >= STEADY * halves[0]
    rate = total / (len(steps) * (WINDOWS - 1) / WINDOWS)
    return _Growth(rate, int(steps["step"][0]), steady and total >= max(GROWTH * levels[0], least))


def _finding(leaking: dict[int, _Growth], where: str, confidence: Confidence) -> Finding:
    worst = max(growth.rate for growth in leaking.values())
    return Finding(
        "memory-leak",
        f"{ranks_do(leaking, 'hold')} {bytes_text(worst)} more of {where} memory after every step",
        tuple(leaking),
        confidence,
        step=min(growth.step for growth in leaking.values()),
        evidence=tuple(
            {"what": "growth of allocated memory", "of": where, "rank": rank, "bytes_a_step": growth.rate}
            for rank, growth in sorted(leaking.items())[:16]
        ),
    )
