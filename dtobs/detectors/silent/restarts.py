"""The steps that a restart does again: what each rank recorded of them in both attempts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dtobs.detectors.silent.config_mismatch import is_state
from dtobs.errors import RecordingError
from dtobs.recording.attempts import Clock, attempt_steps
from dtobs.recording.laws import UPDATES
from dtobs.recording.meta import Meta, read_meta
from dtobs.recording.ring import adapt, read_ring
from dtobs.recording.rundir import RunDirectory
from dtobs.recording.view import RunView

LEAST_STEPS = 4
MOST_STEPS = 64
LEFT_OUT = 4
"""Steps that a scaler may have left out since the optimizer's count was read."""
_NEAREST = 8
"""Records asked for an optimizer's count: a parameter that was frozen, or got no gradient, counts fewer."""
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
    numbered: bool = True  #: the training said which steps these are; else the data told it
    ahead: int = 0  #: by how many steps the data is ahead of what the optimizer counts, where the data told it

    def same_inputs(self) -> bool:
        """Whether all steps done again read what they read before, as far as both are known, and there are enough."""
        one, other = self.before["input_digest"], self.after["input_digest"]
        return len(one) >= LEAST_STEPS and bool((one == other).all() and (one != 0).all())


def redone(view: RunView) -> Iterator[Redone]:
    """What each rank did again.

    Where the training said the steps' numbers in both attempts, these tell which steps are the same. Loops that count
    from 0 in every attempt are aligned by what they read: `after` then begins in the midst of the attempt before, and
    both keep their own numbers. One that reads the beginning again has done nothing again: it may have begun anew. Nor
    is anything said of attempts with another number of ranks, whose data is dealt differently.
    """
    for rank in view.ranks if view.attempt else ():
        earlier = before(view, rank)
        if earlier is None or earlier.world != view.world_size:
            continue
        numbered = [bool(meta.process.get("steps_numbered")) for meta in (earlier.meta, view.meta(rank))]
        if all(numbered):
            yield _align(rank, earlier.steps, view.rank_steps(rank))
        elif not any(numbered) and (found := _align_by_inputs(rank, earlier.steps, view.rank_steps(rank))):
            yield replace(found, ahead=_ahead(view, earlier.number, found))


@dataclass(frozen=True)
class Earlier:
    """What a rank left of the last attempt in which it finished a step: STEP_DTYPE, and the ranks there were."""

    number: int
    meta: Meta
    steps: npt.NDArray[np.void]
    world: int


def before(view: RunView, rank: int) -> Earlier | None:
    """The attempt before this one in which `rank` finished a step; None where there is none."""
    run = RunDirectory(view.root)
    for number in range(view.attempt - 1, -1, -1):
        steps = attempt_steps(view.root, rank, number, _ANY_CLOCK)
        if len(steps):
            return Earlier(number, read_meta(run.meta(rank, number)), steps, _world(run, number))
    return None


def _ahead(view: RunView, earlier: int, pair: Redone) -> int:
    """How far the data is ahead of the optimizer, by the count that the latter keeps; 0 where that is not known.

    A scaler leaves steps out that the optimizer does not count. What was found is kept: records are written over.
    """
    kept: dict[int, int] = view.memo.setdefault("data ahead", {})
    if pair.rank in kept:
        return kept[pair.rank]
    counts = []
    for number, step in ((earlier, int(pair.before["step"][0])), (view.attempt, int(pair.after["step"][0]))):
        path = RunDirectory(view.root).ring(UPDATES.name, pair.rank, number)
        try:
            records = adapt(path, read_ring(path), UPDATES.dtype) if path.exists() else np.zeros(0, UPDATES.dtype)
        except RecordingError:
            return 0
        records = records[np.isfinite(records["done"])]
        if not len(records):
            return 0
        nearest = records[np.abs(records["step"] - step).argsort(kind="stable")[:_NEAREST]]
        counts.append(step + int((nearest["done"] - nearest["step"]).max()))
    loaded = counts[1] > int(pair.after["step"][0])  # else it has counted nothing before this attempt
    apart = (counts[0] - counts[1]) * loaded
    scaled = not (np.isnan(pair.earlier["loss_scale"]).all() and np.isnan(pair.begun["loss_scale"]).all())
    kept[pair.rank] = 0 if scaled and abs(apart) <= LEFT_OUT else apart
    return kept[pair.rank]


def optimizer_states(meta: Meta) -> dict[str, list[str]]:
    """By setting of an optimizer that ends in " state": what it was, "empty" or "kept", in order of the steps."""
    found: dict[str, list[str]] = {}
    for _, fields in meta.settings:
        for name, value in fields.items():
            if is_state(name):
                found.setdefault(name, []).append(value)
    return found


def _world(run: RunDirectory, attempt: int) -> int:
    return sum(run.steps(rank, attempt).exists() for rank in run.ranks())


def _align(rank: int, earlier: npt.NDArray[np.void], steps: npt.NDArray[np.void]) -> Redone:
    begun = steps[:MOST_STEPS]
    _, first, second = np.intersect1d(earlier["step"], begun["step"], return_indices=True)
    return Redone(rank, earlier[first], begun[second], earlier, begun)


def _align_by_inputs(rank: int, earlier: npt.NDArray[np.void], steps: npt.NDArray[np.void]) -> Redone | None:
    """None unless this attempt begins, for `LEAST_STEPS` or more, with what one place alone of the other had read."""
    begun = steps[:MOST_STEPS]
    read, again = earlier["input_digest"], begun["input_digest"]
    known = read[read != 0]
    if len(begun) < LEAST_STEPS or begun["step"][0] > 1 or len(np.unique(known)) < len(known):
        return None  # data that repeats itself proves nothing
    if not again.any():
        return None
    first = int(np.flatnonzero(again)[0])
    places = np.flatnonzero(read == again[first]) - first
    if len(places) != 1 or places[0] <= 0:
        return None
    at = int(places[0])
    count = min(len(earlier) - at, len(begun))
    pair = Redone(rank, earlier[at : at + count], begun[:count], earlier, begun)
    both = (pair.before["input_digest"] != 0) & (pair.after["input_digest"] != 0)
    pair = Redone(rank, pair.before[both], pair.after[both], earlier, begun, numbered=False)
    return pair if pair.same_inputs() else None
