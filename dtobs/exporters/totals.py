"""Sums over all steps that a node has done: what a counter and a histogram need and the bounded history forgets.

They go over all attempts, also those before this monitor. A step that an attempt does again, because it went back to
a checkpoint, is time lost, whatever it was spent on; so is the time from the last step before a restart to the first
one after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dtobs.events import EXPOSED_ALONG, STEP_DTYPE, STEP_PARTS, walls_ns
from dtobs.host.process import boot_id
from dtobs.recording.attempts import Attempt, Clock, attempt_steps, earlier_attempts, highest_finished_step, last_end_ns
from dtobs.recording.journal import standing_share
from dtobs.recording.summary import PRODUCTIVE
from dtobs.recording.view import RunView

BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the histogram of step durations, in seconds."""
_SPARE = 8
_RECENT = 64
"""Steps that say how long a usual one is."""
_COLUMN = {name: STEP_DTYPE.fields[name][1] // 8 for name in STEP_DTYPE.names or ()}  # type: ignore[index]
_PARTS = [_COLUMN[f"{part}_ns"] for part in STEP_PARTS]
_ALONG = [_COLUMN[f"exposed_{along}_ns"] for along in EXPOSED_ALONG]


def _no_time() -> dict[str, float]:
    return dict.fromkeys(STEP_PARTS, 0.0)


@dataclass
class RankTotals:
    """Seconds of one rank over all attempts that it took part in."""

    attempt: int = -1
    stamp: int = 0  #: the last record taken of this attempt
    done: int = 0  #: the page's count of steps then
    steps: int = 0
    redone_steps: int = 0
    last_end_ns: int = 0
    startup: float = 0.0  #: until the first step of the run
    restart: float = 0.0  #: from the last step before each restart to the first one after it
    span: float = 0.0  #: from the first step of each attempt to its last
    parts: dict[str, float] = field(default_factory=_no_time)
    redone: dict[str, float] = field(default_factory=_no_time)  #: of `parts`, spent on steps done before
    hung: dict[str, float] = field(default_factory=_no_time)  #: of `parts`, spent in hangs, in steps not done before
    exposed: dict[str, float] = field(default_factory=lambda: dict.fromkeys(EXPOSED_ALONG, 0.0))  #: by dimension

    def first_time(self, part: str) -> float:
        """Seconds of one part in steps that had not been done before, without hangs."""
        return self.parts[part] - self.redone[part] - self.hung[part]

    @property
    def productive(self) -> float:
        """Seconds of computing that moved the training on."""
        return sum(self.first_time(part) for part in PRODUCTIVE)

    @property
    def between(self) -> float:
        """Seconds between the steps of an attempt."""
        return max(0.0, self.span - sum(self.parts.values()))

    @property
    def elapsed(self) -> float:
        """Seconds up to the end of the last step."""
        return self.startup + self.restart + self.span


@dataclass
class StepTotals:
    """Takes each step record once, as long as `update` is called more often than the history wraps (4,096 steps)."""

    ranks: dict[int, RankTotals] = field(default_factory=dict)
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))  #: not cumulative; the last is +Inf
    seconds: float = 0.0
    listeners: list[Callable[[npt.NDArray[np.float64]], None]] = field(default_factory=list)
    _earlier: tuple[Attempt, ...] = ()
    _before: int = 0  #: the attempt that they are earlier than
    _clock: Clock = field(default_factory=lambda: Clock("", 0))

    @property
    def count(self) -> int:
        """Steps taken into the histogram."""
        return sum(self.buckets)

    def update(self, view: RunView, ranks: list[int], hung: Sequence[int] = ()) -> None:
        """Take what the given ranks have done since the last time; `hung` are moments within hangs."""
        if view.attempt != self._before:
            self._before, self._clock = view.attempt, _clock(view)
            self._earlier = tuple(earlier_attempts(view.root, view.attempt, self._clock))
        for rank in ranks:
            self._take(view, rank, hung)

    def _take(self, view: RunView, rank: int, hung: Sequence[int]) -> None:
        page = view.page(rank)
        totals = self.ranks.setdefault(rank, RankTotals())
        attempt, attach_ns = int(page["attempt"]), int(page["attach_ns"])
        if totals.attempt != attempt:
            self._take_earlier(view, rank, totals)
            totals.attempt, totals.stamp, totals.done = attempt, 0, 0
        fresh = _since(view, rank, totals.stamp, int(page["steps_done"]) - totals.done)
        totals.done = int(page["steps_done"])
        self._add(totals, fresh, self._earlier, attach_ns)
        if hung and len(fresh):
            recent = view.recent_steps(rank, _RECENT)
            share = standing_share(fresh, hung, float(np.median(walls_ns(recent))))
            share[fresh["step"] <= highest_finished_step(self._earlier)] = 0.0
            for part in STEP_PARTS:
                totals.hung[part] += float((fresh[f"{part}_ns"] * share).sum()) / 1e9

    def _take_earlier(self, view: RunView, rank: int, totals: RankTotals) -> None:
        """Attempts that nobody watched, or that ended between two looks."""
        for place, attempt in enumerate(self._earlier):
            if attempt.number < totals.attempt:
                continue
            if attempt.number > totals.attempt:
                totals.stamp = 0
            steps = attempt_steps(view.root, rank, attempt.number, self._clock)
            fresh = steps[steps["stamp"] > totals.stamp]
            self._add(totals, fresh, self._earlier[:place], attempt.attach_ns)

    def _add(
        self, totals: RankTotals, fresh: npt.NDArray[np.void], earlier: tuple[Attempt, ...], attach_ns: int
    ) -> None:
        """Take records of one attempt that come after `totals.stamp`."""
        if not len(fresh):
            return
        begin_ns, end_ns = int(fresh["begin_ns"][0]), int(fresh["end_ns"][-1])
        if totals.stamp == 0:
            if int(fresh["stamp"][0]) > 1:
                pass  # the history has wrapped before anybody looked
            elif any(attempt.end_ns for attempt in earlier):
                totals.restart += max(0, begin_ns - last_end_ns(earlier)) / 1e9
            else:
                since = min([attach_ns, *(attempt.attach_ns for attempt in earlier)])
                totals.startup += max(0, begin_ns - since) / 1e9
            totals.span += (end_ns - begin_ns) / 1e9
        else:
            totals.span += max(0, end_ns - totals.last_end_ns) / 1e9
        totals.stamp, totals.last_end_ns = int(fresh["stamp"][-1]), end_ns
        totals.steps += len(fresh)
        again = fresh[fresh["step"] <= highest_finished_step(earlier)]
        totals.redone_steps += len(again)
        for sums, records in ((totals.parts, fresh), (totals.redone, again)):
            for part, seconds in zip(STEP_PARTS, _seconds(records, _PARTS), strict=True):
                sums[part] += seconds
        for along, seconds in zip(EXPOSED_ALONG, _seconds(fresh, _ALONG), strict=True):
            totals.exposed[along] += seconds
        walls = walls_ns(fresh) / 1e9
        for place in np.searchsorted(BUCKETS, walls, side="left"):
            self.buckets[int(place)] += 1
        self.seconds += float(walls.sum())
        for listener in self.listeners:
            listener(walls)


def _seconds(records: npt.NDArray[np.void], columns: list[int]) -> list[float]:
    """The sums of those columns of times; in one operation, because there may be thousands of ranks."""
    if not len(records):
        return [0.0] * len(columns)
    numbers = np.ascontiguousarray(records).view(np.int64).reshape(len(records), -1)
    found: list[float] = (numbers[:, columns].sum(axis=0) / 1e9).tolist()
    return found


def _clock(view: RunView) -> Clock:
    """The axis of the view's times: the clock of this host where ranks ran here, else that of the first node."""
    boots = {rank: view.meta(rank).process.get("boot_id") for rank in view.ranks}
    here = boot_id()
    rank = next((rank for rank in view.ranks if boots[rank] == here), view.ranks[0])
    return Clock(str(boots[rank]), int(view.page(rank)["clock_offset_ns"]))


def _since(view: RunView, rank: int, stamp: int, expected: int) -> npt.NDArray[np.void]:
    """The records after `stamp`, about `expected` of them; the whole history is read only when they are more."""
    records = view.recent_steps(rank, expected + _SPARE) if stamp else view.rank_steps(rank)
    if stamp and len(records) and int(records["stamp"][0]) > stamp + 1:
        records = view.rank_steps(rank)
    fresh = records[records["stamp"] > stamp]
    # On a device the newest steps have the host's times until its own are known.
    known = np.flatnonzero(records["device_marks"] > 0)
    late = len(records) - 1 - int(known[-1]) if len(known) else 0
    return fresh[: max(0, len(fresh) - late)] if 0 < late <= _SPARE else fresh
