"""learning-rate-not-scaled: a restart on another number of ranks keeps the learning rate of another effective batch.

What it does: compares the attempt with the one before. Where the data ranks together read at least `TIMES` times as
much a step, or as little, while the learning rate went on as it was, it is said. It is only possible that this is a
mistake: which rule is right (the linear one for SGD, the square root for Adam, none) depends on optimizer and task.

Why it hurts: with a larger batch the same rate learns less from each sample; with a smaller one it is noisier, and may
diverge.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dtobs.detectors.silent.restarts import Earlier, before
from dtobs.findings import Confidence, Finding
from dtobs.recording.meta import Meta
from dtobs.recording.view import RunView
from dtobs.words import count

TIMES = 1.5
LEAST_STEPS = 4
MOST_STEPS = 64
SAME_RATE = 0.05
"""A schedule moves by no more between two steps; the square root of `TIMES` is four times as far."""


def learning_rate_not_scaled(view: RunView) -> list[Finding]:
    """One finding about all ranks."""
    rank = view.ranks[0] if view.ranks else 0
    earlier = before(view, rank) if view.attempt and view.ranks else None
    if earlier is None:
        return []
    steps = view.rank_steps(rank)
    ranks = [_data_ranks(meta) for meta in (earlier.meta, view.meta(rank))]
    sizes = [_elements(earlier.steps[-MOST_STEPS:]), _elements(steps[:MOST_STEPS])]
    if ranks[0] == ranks[1] or not all(ranks) or not all(sizes):
        return []
    times = ranks[1] * sizes[1] / (ranks[0] * sizes[0])
    was, rate = _rates(earlier, view, rank)
    if max(times, 1 / times) < TIMES or not was > 0 or not abs(rate / was - 1) <= SAME_RATE:
        return []
    more = f"{times:.3g} times as much" if times > 1 else f"{times:.0%} as much"
    return [
        Finding(
            "learning-rate-not-scaled",
            f"since the restart {count(ranks[1], 'data rank')} read {more} a step as {ranks[0]} did before, and the"
            f" learning rate is {rate:.4g} as before; it is usually multiplied by {times:.3g} for SGD and by"
            f" {times**0.5:.3g} for Adam",
            tuple(view.ranks),
            Confidence.POSSIBLE,
            step=int(steps["step"][0]),
            evidence=({"what": "effective batch", "data_ranks": ranks, "times": times, "learning_rates": [was, rate]},),
        )
    ]


def _data_ranks(meta: Meta) -> int:
    return len(meta.layout.get("data_ranks") or ())


def _elements(steps: npt.NDArray[np.void]) -> float:
    """What a rank usually reads a step; 0 where that is not known."""
    known = steps["input_elements"][steps["input_elements"] > 0]
    return float(np.median(known)) if len(known) >= LEAST_STEPS else 0.0


def _rates(earlier: Earlier, view: RunView, rank: int) -> tuple[float, float]:
    """The learning rates before and after the restart: of the first step done again, else of the steps next to it."""
    then, now = earlier.steps, view.rank_steps(rank)
    numbered = all(meta.process.get("steps_numbered") for meta in (earlier.meta, view.meta(rank)))
    _, left, right = np.intersect1d(then["step"], now["step"], return_indices=True)
    at = (left[0], right[0]) if numbered and len(left) else (-1, 0)
    return float(then["learning_rate"][at[0]]), float(now["learning_rate"][at[1]])
