"""Sums over all steps that a node has done: what a counter and a histogram need and the bounded history forgets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dtobs.events import STEP_PARTS
from dtobs.recording.view import RunView

BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the histogram of step durations, in seconds."""
_SPARE = 8
PRODUCTIVE = ("forward", "backward", "optimizer")


@dataclass
class RankTotals:
    """Seconds of one rank since the monitor first saw it, over all attempts."""

    first_attach_ns: int
    attempt: int = -1
    stamp: int = 0  #: the last record taken
    done: int = 0  #: the page's count of steps then
    steps: int = 0
    last_end_ns: int = 0
    startup: float = 0.0
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STEP_PARTS, 0.0))

    @property
    def productive(self) -> float:
        """Seconds of computing that moved the training on."""
        return sum(self.parts[part] for part in PRODUCTIVE)

    @property
    def between(self) -> float:
        """Seconds outside start-up and steps, up to the end of the last step."""
        if not self.last_end_ns:
            return 0.0
        elapsed = (self.last_end_ns - self.first_attach_ns) / 1e9
        return max(0.0, elapsed - self.startup - sum(self.parts.values()))


@dataclass
class StepTotals:
    """Takes each step record once, as long as `update` is called more often than the history wraps (4,096 steps)."""

    ranks: dict[int, RankTotals] = field(default_factory=dict)
    buckets: list[int] = field(
        default_factory=lambda: [0] * (len(BUCKETS) + 1)
    )  #: not cumulative; the last is +Inf
    seconds: float = 0.0
    listeners: list[Callable[[npt.NDArray[np.float64]], None]] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Steps taken into the histogram."""
        return sum(self.buckets)

    def update(self, view: RunView, ranks: list[int]) -> None:
        """Take what the given ranks have done since the last time."""
        for rank in ranks:
            self._take(view, rank)

    def _take(self, view: RunView, rank: int) -> None:
        page = view.page(rank)
        totals = self.ranks.setdefault(rank, RankTotals(int(page["attach_ns"])))
        if totals.attempt != int(page["attempt"]):
            totals.attempt, totals.stamp, totals.done = int(page["attempt"]), 0, 0
        fresh = _since(view, rank, totals.stamp, int(page["steps_done"]) - totals.done)
        totals.done = int(page["steps_done"])
        if not len(fresh):
            return
        if totals.stamp == 0 and int(fresh["stamp"][0]) == 1:
            totals.startup += max(0, int(fresh["begin_ns"][0]) - int(page["attach_ns"])) / 1e9
        totals.stamp = int(fresh["stamp"][-1])
        totals.last_end_ns = int(fresh["end_ns"][-1])
        totals.steps += len(fresh)
        for part in STEP_PARTS:
            totals.parts[part] += float(fresh[f"{part}_ns"].sum()) / 1e9
        walls = np.asarray((fresh["end_ns"] - fresh["begin_ns"]) / 1e9, np.float64)
        for place in np.searchsorted(BUCKETS, walls, side="left"):
            self.buckets[int(place)] += 1
        self.seconds += float(walls.sum())
        for listener in self.listeners:
            listener(walls)


def _since(view: RunView, rank: int, stamp: int, expected: int) -> npt.NDArray[np.void]:
    """The records after `stamp`, about `expected` of them; the whole history is read only when they are more."""
    records = view.recent_steps(rank, expected + _SPARE) if stamp else view.rank_steps(rank)
    if stamp and len(records) and int(records["stamp"][0]) > stamp + 1:
        records = view.rank_steps(rank)
    return records[records["stamp"] > stamp]
