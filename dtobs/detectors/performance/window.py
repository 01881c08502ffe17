"""The steps that performance is judged on: recent, complete, and without the first ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dtobs.events import STEP_PARTS
from dtobs.recording.view import RunView

LAST = 64
WARM_UP = 3
"""Steps at the beginning of an attempt that do not count: allocation, compilation, the first files."""

MOST_STEPS = 512
LEAST_STEPS, SETTLED_SECONDS = 12, 15.0
"""What lasts a shorter time is chance: another process, the cache of a file, a toy."""
OVERLOADED = 0.2
"""Beyond this share of the time in which ranks want a core and have none, chance decides how long anything takes."""

CROWDED = 1 / 3
"""Beyond this share of the time in which ranks use a core or want one, they have none: where they mostly wait for other
things, that is little time, but each message pays it."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Times:
    """Seconds of each step, float64[ranks, steps]: `wall` without validation and checkpoints, `busy` also without
    waiting for other ranks, of it `delayed` without a core to run on, and the `parts`. `records` is STEP_DTYPE of the
    same shape.
    """

    steps: npt.NDArray[np.int64]
    wall: Floats
    busy: Floats
    delayed: Floats
    parts: dict[str, Floats]
    end_ns: npt.NDArray[np.int64]
    records: npt.NDArray[np.void]

    def of(self, keep: npt.NDArray[np.bool_]) -> Times:
        """Only the steps where `keep`, bool[steps], is true."""
        parts = {part: seconds[:, keep] for part, seconds in self.parts.items()}
        seconds = (self.wall[:, keep], self.busy[:, keep], self.delayed[:, keep])
        return Times(self.steps[keep], *seconds, parts, self.end_ns[:, keep], self.records[:, keep])

    def by_round(self, size: int) -> Times:
        """Rounds of `size` steps that follow each other, the newest whole ones, each with the mean of its steps.

        Loader workers give their batches one after the other, each when the loop has taken its last one: of as many
        steps one waits for all. `records`, `steps` and `end_ns` are of the last step of each round.
        """
        rounds = len(self.steps) // size
        if size < 2 or not rounds:
            return self
        newest = slice(len(self.steps) - rounds * size, None)

        def mean(values: Floats) -> Floats:
            found: Floats = values[:, newest].reshape(len(values), rounds, size).mean(axis=2)
            return found

        ends = slice(newest.start + size - 1, None, size)
        parts = {part: mean(seconds) for part, seconds in self.parts.items()}
        seconds = (mean(self.wall), mean(self.busy), mean(self.delayed))
        return Times(self.steps[ends], *seconds, parts, self.end_ns[:, ends], self.records[:, ends])

    @property
    def settled(self) -> bool:
        """Whether they are enough, and last long enough, to say something of how the run is."""
        return len(self.steps) >= LEAST_STEPS and float(self.wall.sum(axis=1).min()) >= SETTLED_SECONDS

    @property
    def overloaded(self) -> bool:
        """Whether the machine has fewer cores than threads that want one: most ranks wait for theirs.

        Counted against the time in which they do not wait for each other: who waits wants no core, but the threads that
        carry the messages do, and lack it as the others do.
        """
        share = self.records["run_delay_ns"].sum(axis=1) / 1e9 / np.maximum(self.busy.sum(axis=1), 1e-9)
        return bool(np.median(share) > OVERLOADED)

    @property
    def crowded(self) -> bool:
        """Whether ranks lack a core when they want one, however seldom that is: then a message waits for its sender's
        and its receiver's turn, and how long it takes says nothing of communication. Implied by `overloaded`.
        """
        delay, used = (self.records[name].sum(axis=1).astype(np.float64) for name in ("run_delay_ns", "cpu_ns"))
        return self.overloaded or bool(np.median(delay / np.maximum(delay + used, 1.0)) > CROWDED)

    def seconds(self, name: str) -> Floats:
        """A field of the records that counts nanoseconds, as float64[ranks, steps] seconds."""
        return self.records[f"{name}_ns"].astype(np.float64) / 1e9


def step_times(view: RunView, rows: list[int], last: int = LAST) -> Times | None:
    """The newest `last` steps that all of `rows` have recorded, past the warm-up; None when there are none."""
    if not rows:
        return None
    window = view.steps(last + WARM_UP)
    keep = window.valid[rows].all(axis=0) & (window.steps >= _first(view, rows, last) + WARM_UP)
    records = window.records[rows][:, keep]
    if not records.shape[1]:
        return None
    parts = {part: records[f"{part}_ns"].astype(np.float64) / 1e9 for part in STEP_PARTS}
    # A step with a validation or a checkpoint in it is one of rank 0's usual extras: only the rest is compared.
    wall = sum((parts[p] for p in STEP_PARTS if p not in ("validation", "checkpoint")), np.zeros(records.shape))
    busy = wall - parts["exposed"]
    # A rank is also kept from its core when a wait is over, so that the delay may exceed what is left without waits.
    delayed = np.minimum(_delay(records), busy)
    return Times(window.steps[keep], wall, busy, delayed, parts, records["end_ns"], records)


def _delay(records: npt.NDArray[np.void]) -> Floats:
    """Seconds without a core that others took, float64[ranks, steps].

    The kernel counts what a used-up quota costs as waiting for a core too. That is the rank's own, and leaves by its
    share of the whole: it is read less often than steps end.
    """
    delay, throttled = (records[f"{name}_ns"].astype(np.float64) / 1e9 for name in ("run_delay", "throttled"))
    own = throttled.sum(axis=1, keepdims=True) / np.maximum(delay.sum(axis=1, keepdims=True), 1e-9)
    by_others: Floats = delay * np.maximum(0.0, 1.0 - own)
    return by_others


def _first(view: RunView, rows: list[int], last: int) -> int:
    """The latest first step of `rows`, where a window of the newest `last` steps may reach as far back as that."""
    done = view.pages["steps_done"]
    young = [view.ranks[r] for r in rows if done[r] < last + 2 * WARM_UP]
    return max((int(view.recent_steps(rank, last + 2 * WARM_UP)["step"][:1].sum()) for rank in young), default=0)
