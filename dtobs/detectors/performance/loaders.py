"""How fast the loader workers of each rank give batches, see `probes.loader_workers`.

Where the loaders of all ranks are too slow alike, one rank alone is seen to wait for data: the others wait for it in
each step, and have their next batch by then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dtobs.detectors.performance.cause import Cause
from dtobs.detectors.performance.window import Times
from dtobs.recording.view import RunView
from dtobs.words import duration_text

ALIKE = 0.8
"""A loader is as slow as another where a batch takes it that share of the other's time."""
LIMITS = 0.7
"""It limits the training where the batches of a step take that share of the step."""


@dataclass(frozen=True)
class LoaderPace:
    """`seconds` that a batch takes one of a rank's `workers`."""

    workers: int
    seconds: float

    @property
    def period(self) -> float:
        """Seconds from one batch to the next, all workers at work."""
        return self.seconds / self.workers


def pace_of(view: RunView, rank: int) -> LoaderPace | None:
    """That of a rank's loader; None where nobody counted it."""
    said = view.meta(rank).process.get("loader_workers")
    if not isinstance(said, dict):
        return None
    workers, batches, seconds = (said.get(name) for name in ("workers", "batches", "seconds"))
    numbers = [n for n in (workers, batches, seconds) if isinstance(n, (int, float)) and math.isfinite(n) and n > 0]
    return LoaderPace(int(numbers[0]), numbers[2] / numbers[1]) if len(numbers) == 3 and numbers[0] >= 1 else None


def as_slow(view: RunView, rank: int, group: Sequence[int], times: Times, row: int) -> list[int]:
    """The ranks of `group` whose loaders are about as slow as that of `rank`, which its steps wait for.

    `row` is where `times` has `rank`. Empty where the loader's workers are not what limits it.
    """
    own = pace_of(view, rank)
    if own is None:
        return []
    if own.period * batches_a_step(times, row) < LIMITS * float(np.median(times.wall[row])):
        return []
    paces = ((other, pace_of(view, other)) for other in group if other != rank)
    return [other for other, pace in paces if pace is not None and pace.period >= ALIKE * own.period]


def slower_loader(view: RunView, rank: int, group: Sequence[int], cause: Cause) -> Cause:
    """`cause`, that a rank waits for its data; what a batch takes its workers where that is more than the others'."""
    own, paces = pace_of(view, rank), [pace_of(view, other) for other in group if other != rank]
    known = [pace for pace in paces if pace is not None]
    if own is None or 2 * len(known) < len(paces):
        return cause
    theirs = float(np.median([pace.seconds for pace in known]))
    if ALIKE * own.seconds < theirs:
        return cause
    took, usual = duration_text(own.seconds), duration_text(theirs)
    words = f"a batch takes its loader workers {took}, and those of its peers {usual}"
    advice = "Look at the storage of this rank's host, and at the cores that its loader workers have."
    return replace(cause, words=words, next_step=advice)


def batches_a_step(times: Times, row: int) -> float:
    """How many batches a step takes: its micro-batches."""
    return max(1.0, float(np.median(times.records["micro_batches"][row])))
