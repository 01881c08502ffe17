"""memory-leak: what a rank holds at the end of a step grows with every step, without an end.

What it does: takes the device's allocated bytes after each step, past the warm-up, in `WINDOWS` windows. A leak grows
from each window to the next, by `GROWTH` and `LEAST_BYTES` in all, and in the second half still by most of what it grew
in the first: caches, longer sequences and a first validation level off. Where ranks train on the host, the same is
asked of the resident memory that is theirs alone, without mapped files and shared memory. A cache of the data grows for
a whole pass there too. So of the ranks that grow by `HOST_BYTES` those are named that go on growing in later passes,
for at least `LEAST_LATER` steps, and one that grows `ALONE` times as fast as the ranks that do the same work.

Why it hurts: the run ends with an out-of-memory error, hours later.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
LEAST_LATER = 48


@dataclass(frozen=True)
class _Growth:
    """Bytes a step, since which step, and whether it is that of a leak."""

    rate: float
    step: int
    leaks: bool
    lasts: bool = False  #: it goes on where all data has been read


def memory_leak(view: RunView) -> list[Finding]:
    """At most one finding for devices and two for hosts, likely and possible, each with all its leaking ranks."""
    device, host = _leaking(view)
    lasting = {rank: growth for rank, growth in host.items() if growth.lasts}
    alone = {rank: growth for rank, growth in host.items() if not growth.lasts}
    found = (
        (device, "device", Confidence.LIKELY),
        (lasting, "host", Confidence.LIKELY),
        (alone, "host", Confidence.POSSIBLE),
    )
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
            if _lasts(steps[rank], _all_read(view.meta(rank).passes)):
                host[rank] = replace(growth, lasts=True)
                continue
            peers = [other.rate for r, other in of_group.items() if r != rank and other is not None]
            if len(peers) == len(group) - 1 > 0 and growth.rate >= ALONE * statistics.median(peers):
                host[rank] = growth
    return device, host


def _all_read(passes: Sequence[Mapping[str, int]]) -> float:
    """The step by which every loader's data has been read once; infinite before it is, and where nobody knows."""
    begins: dict[int, list[int]] = {}
    for each in passes:
        begins.setdefault(each["sampler"], []).append(each["step"])
    return max((of_one[1] if len(of_one) > 1 else math.inf for of_one in begins.values()), default=math.inf)


def _lasts(steps: npt.NDArray[np.void], all_read: float) -> bool:
    """Whether the process's own memory grows after step `all_read` as it grew before."""
    held = steps["private_bytes"].astype(np.float64)
    later = steps["step"] >= all_read
    if later.sum() < LEAST_LATER or not (~later).any():
        return False
    levels = np.array([window.min() for window in np.array_split(held[later], WINDOWS // 2)])
    count = later.sum() * (1 - 2 / WINDOWS)
    before = (levels[0] - held[0]) / (~later).sum()
    return bool((np.diff(levels) > 0).all() and (levels[-1] - levels[0]) / count >= STEADY * before)


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
