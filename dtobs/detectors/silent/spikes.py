"""loss-spike, gradient-spike: a number that leaps out of what it was, and comes back.

What it does: compares each step's loss (the mean over the ranks that have one) and gradient norm with the median of the
`BEFORE` steps before it, in units of their own scatter. Only a leap from which the number comes back within `AFTER`
steps counts: what rises and stays is a new stage of a curriculum, a new learning rate, or a run that diverges. The
first steps of an attempt, and steps around a jump of the learning rate, say nothing. Where optimizers step in turn (a
GAN) each is compared with its own steps.

Why it hurts: a spike costs what was learnt in the steps before, and many of them end in a loss that does not come back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import significant

BEFORE, AFTER = 48, 32
"""Steps before a leap that say what is usual, and after it within which the number must come back."""
LEAST_BEFORE, EARLY = 16, 3.0
"""Of fewer steps before it, a leap has to be that many times as large."""
LEAST_AFTER = 6
SCATTER = 12.0
"""A leap is that many times the usual scatter (the median distance from the median) …"""
JUMP = 1.25
"""A learning rate that changes more than this from one step to the next has jumped."""
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Quantity:
    """… and that many times the usual value."""

    code: str
    words: str
    times: float


_LOSS = _Quantity("loss-spike", "the loss", 1.5)
_NORM = _Quantity("gradient-spike", "the gradient norm", 30.0)


def spikes(view: RunView) -> list[Finding]:
    """One finding for each quantity: its largest spike in the history that is kept."""
    window = view.steps(1024)
    if len(window.steps) < LEAST_BEFORE + 3 or not len(window.records):
        return []
    rate = _mean(window.field("learning_rate"))
    norm = _mean(window.field("reduced_norm"))
    if np.isfinite(norm).sum() < min(BEFORE, len(window.steps) // 2):
        norm = _mean(window.field("sample_norm"))
    found = []
    in_turn = list(_in_turn(window.field("optimizers")))
    for quantity, values in ((_LOSS, _mean(window.field("loss"))), (_NORM, norm)):
        for some in in_turn:
            at = list(_leaps(values[some], quantity.times, _jumps(rate[some])))
            if at:
                found.append(_finding(view, quantity, values[some], window.steps[some], at))
                break
    return found


def _in_turn(optimizers: Floats) -> Iterator[npt.NDArray[np.intp]]:
    """The places of the steps that the same optimizers made."""
    which = np.nan_to_num(optimizers).max(axis=0)
    for some in np.unique(which):
        yield np.flatnonzero(which == some)


def _mean(values: Floats) -> Floats:
    """The mean over ranks that have the number; NaN where none has, or one is not finite."""
    with np.errstate(invalid="ignore"):
        some = np.isfinite(values).any(axis=0) & ~np.isinf(values).any(axis=0)
        total = np.nansum(np.where(np.isfinite(values), values, 0.0), axis=0)
        mean: Floats = np.where(some, total / np.maximum(1, np.isfinite(values).sum(axis=0)), np.nan)
    return mean


def _jumps(rate: Floats) -> npt.NDArray[np.intp]:
    """Where the learning rate is not what it was the step before."""
    with np.errstate(all="ignore"):
        change = np.abs(np.log(rate[1:] / rate[:-1]))
    return np.flatnonzero(change > np.log(JUMP)) + 1


def _leaps(values: Floats, times: float, jumps: npt.NDArray[np.intp]) -> Iterator[int]:
    """Places of `values` that leap and come back, in order."""
    known = np.flatnonzero(np.isfinite(values))
    quiet = -1
    for n in range(LEAST_BEFORE, len(known) - 1):
        at = int(known[n])
        before = values[known[max(0, n - BEFORE) : n]]
        usual = float(np.median(before))
        scatter = float(np.median(np.abs(before - usual)))
        limit = max(usual + SCATTER * scatter, usual * times, float(before.max()))
        limit *= 1.0 if n >= BEFORE else EARLY
        if values[at] <= limit or usual <= 0 or at <= quiet:
            continue
        later = values[known[n + 1 : n + 1 + AFTER]]
        if len(later) < LEAST_AFTER or np.median(later) > usual + (values[at] - usual) / 4:
            continue  # it stays there, or nobody knows yet
        quiet = at + AFTER  # one leap is told once
        if not len(jumps) or np.abs(jumps - at).min() > AFTER:
            yield at


def _finding(
    view: RunView, quantity: _Quantity, values: Floats, steps: npt.NDArray[np.int64], at: list[int]
) -> Finding:
    worst = max(at, key=lambda place: float(values[place]))
    usual = float(np.nanmedian(values[max(0, worst - BEFORE) : worst]))
    step = int(steps[worst])
    more = f"; {len(at) - 1} more before and after" if len(at) > 1 else ""
    return Finding(
        quantity.code,
        f"{quantity.words} leapt to {significant(float(values[worst]))} in step {step}, from about"
        f" {significant(usual)} in the steps before{more}",
        (),
        Confidence.LIKELY,
        step=step,
        evidence=(
            {
                "what": quantity.words,
                "step": step,
                "value": float(values[worst]),
                "usual": usual,
                "steps": [int(steps[place]) for place in at[:16]],
            },
        ),
    )
