"""The steps that a restart does again: what each rank recorded of them in both attempts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dtobs.recording.attempts import Clock, attempt_steps
from dtobs.recording.meta import Meta, read_meta
from dtobs.recording.rundir import RunDirectory
from dtobs.recording.view import RunView

LEAST_STEPS = 4
MOST_STEPS = 64
_ANY_CLOCK = Clock("", 0)


@dataclass(frozen=True)
class Redone:
    """One rank's steps in two attempts, STEP_DTYPE each: `before[i]` and `after[i]` have the same step number.

    `earlier` is all that the attempt before has on record, `begun` the first steps of this attempt.
    """

    rank: int
    before: npt.NDArray[np.void]
    after: npt.NDArray[np.void]
    earlier: npt.NDArray[np.void]
    begun: npt.NDArray[np.void]

    def same_inputs(self) -> bool:
        """Whether all steps done again read what they read before, as far as both are known, and there are enough."""
        one, other = self.before["input_digest"], self.after["input_digest"]
        return len(one) >= LEAST_STEPS and bool((one == other).all() and (one != 0).all())


def redone(view: RunView) -> Iterator[Redone]:
    """What each rank did again, where the training said the steps' numbers in both attempts.

    Loops that count their steps from 0 in every attempt give no comparison: nobody knows which steps are the same. Nor
    do attempts with another number of ranks, whose data is dealt differently.
    """
    for rank in view.ranks if view.attempt else ():
        earlier = before(view, rank) if view.meta(rank).process.get("steps_numbered") else None
        if earlier is None:
            continue
        if earlier.meta.process.get("steps_numbered") and earlier.world == view.world_size:
            yield _align(rank, earlier.steps, view.rank_steps(rank))


@dataclass(frozen=True)
class Earlier:
    """What a rank left of the last attempt in which it finished a step: STEP_DTYPE, and the ranks there were."""

    meta: Meta
    steps: npt.NDArray[np.void]
    world: int


def before(view: RunView, rank: int) -> Earlier | None:
    """The attempt before this one in which `rank` finished a step; None where there is none."""
    run = RunDirectory(view.root)
    for number in range(view.attempt - 1, -1, -1):
        steps = attempt_steps(view.root, rank, number, _ANY_CLOCK)
        if len(steps):
            return Earlier(read_meta(run.meta(rank, number)), steps, _world(run, number))
    return None


def _world(run: RunDirectory, attempt: int) -> int:
    return sum(run.steps(rank, attempt).exists() for rank in run.ranks())


def _align(rank: int, earlier: npt.NDArray[np.void], steps: npt.NDArray[np.void]) -> Redone:
    begun = steps[:MOST_STEPS]
    _, first, second = np.intersect1d(earlier["step"], begun["step"], return_indices=True)
    return Redone(rank, earlier[first], begun[second], earlier, begun)
