"""local-gradient-outlier: one rank's own gradient is far from its peers' and from its own past.

What it does: follows the logarithm of every rank's gradient norm before reduction. A step counts against a rank when it
deviates by more than `Z` standard deviations both from the mean of the other ranks of its data-parallel group, leaving
itself out (as its usual distance from them goes), and from its own exponential moving average. `LEAST_STEPS` such steps
within `WITHIN`, or a single one beyond `HUGE` times, make a finding for the next `RECENT` steps; deviations below
`SMALL` times never do. One step alone proves little: norms have heavy tails (single batches of healthy runs on real
text were 20 times their neighbours), a fault stays. A rank that was `PERSISTENT` times off from the very first step is
found by the ratio alone, and only as possible: each rank may train on a domain of its own, which
``session.policy(data="own")`` says.

Both comparisons are needed: at two ranks leave-one-out cannot tell which one is off, and over time the norms of all
ranks move together. Averages are kept in logarithms and take in a deviating step only up to `CLIP` standard
deviations, so one wild step does not blind the following ones.

Why it hurts: the average over ranks follows the loudest one: its data, its scaling or its device decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dtobs.detectors.peers import data_groups, hands_on_to, rows_of
from dtobs.findings import Confidence, Finding
from dtobs.recording.step_window import StepWindow
from dtobs.recording.view import RunView
from dtobs.words import ranks_text

WINDOW = 256
RECENT = 64
LEAST_STEPS, WITHIN = 4, 6
Z = 5.0
SMALL, PERSISTENT, HUGE = 1.5, 30.0, 1e3
CLIP = 2.0
# The usual distance from the others changes slowly; a rank's own norm follows the whole job's.
_SLOW, _FAST = 0.05, 0.2
_FIRST_DEVIATION, _LEAST_DEVIATION = 0.3, 0.05

Floats = npt.NDArray[np.float64]


def local_gradient_outlier(view: RunView) -> list[Finding]:
    """At most one finding a rank."""
    found = []
    window = view.steps(WINDOW)
    for group in data_groups(view):
        rows = rows_of(view, group)
        norms = window.field("sample_norm")[rows]
        if not np.isfinite(norms).any():
            norms = window.field("local_norm")[rows]
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.where(np.isfinite(norms) & (norms > 0), np.log(norms), np.nan)
        flagged, cross = _deviations(logs)
        for member, rank in enumerate(group):
            at = np.flatnonzero(flagged[member])
            at = at[at >= logs.shape[1] - RECENT]
            huge = at[np.abs(cross[member, at]) > math.log(HUGE)]
            dense = len(at) >= LEAST_STEPS and (at[LEAST_STEPS - 1 :] - at[: 1 - LEAST_STEPS] < WITHIN).any()
            if dense or len(huge):
                found.append(_describe(window, rows, group, rank, at, cross[member], norms))
        own = all(view.meta(rank).policy.get("data") == "own" for rank in group)
        if not flagged.any() and not own:
            found += _always_off(window, group, logs)
    return _where_they_began(view, found)


def _where_they_began(view: RunView, found: list[Finding]) -> list[Finding]:
    """Without the stages of a pipeline to which the next one only handed its own loud gradient back."""
    step_of = {rank: finding.step or 0 for finding in found for rank in finding.ranks}
    if len(step_of) < 2:
        return found
    handed = {
        rank: next((b for b in sorted(hands_on_to(view, rank) & step_of.keys()) if step_of[b] <= step), None)
        for rank, step in step_of.items()
    }
    began: dict[int, list[int]] = {}
    for rank in sorted(handed):
        origin, seen = rank, {rank}
        while (onward := handed[origin]) is not None and onward not in seen:
            origin = onward
            seen.add(origin)
        if origin != rank:
            began.setdefault(origin, []).append(rank)
    ends = {rank: f"; {ranks_text(others)} got it back through the pipeline" for rank, others in began.items()}
    return [
        replace(finding, summary=finding.summary + ends.get(finding.ranks[0], ""))
        for finding in found
        if handed[finding.ranks[0]] is None
    ]


@dataclass
class _Track:
    """Moving mean and variance of one quantity a rank: float64[ranks]."""

    mean: Floats
    variance: Floats
    pace: float

    def deviation(self, value: Floats) -> tuple[Floats, Floats]:
        """(value − mean, the same in standard deviations); NaN in, NaN out."""
        off = value - self.mean
        return off, off / np.sqrt(np.maximum(self.variance, _LEAST_DEVIATION**2))

    def take(self, value: Floats) -> None:
        off, z = self.deviation(value)
        known = np.isfinite(off)
        kept = np.where(known, off, 0.0) * np.minimum(1.0, CLIP / np.maximum(np.abs(np.where(known, z, 1.0)), 1e-9))
        fresh = known & ~np.isfinite(self.mean)
        self.mean = np.where(np.isfinite(value) & ~np.isfinite(self.mean), value, self.mean + self.pace * kept)
        moved = (1 - _SLOW) * (self.variance + _SLOW * kept**2)
        self.variance = np.where(known & ~fresh, moved, self.variance)


def _deviations(logs: Floats) -> tuple[npt.NDArray[np.bool_], Floats]:
    """(bool[ranks, steps] flagged, float64[ranks, steps] deviation from the others, as a logarithm)."""
    ranks, steps = logs.shape
    flagged, cross = np.zeros((ranks, steps), bool), np.full((ranks, steps), np.nan)
    against_others = _Track(np.zeros(ranks), np.full(ranks, _FIRST_DEVIATION**2), _SLOW)
    against_past = _Track(np.full(ranks, np.nan), np.full(ranks, _FIRST_DEVIATION**2), _FAST)
    for step in range(steps):
        value = logs[:, step]
        if not np.isfinite(value).any():
            continue
        difference = value - _others(value)
        off, z_others = against_others.deviation(difference)
        _, z_past = against_past.deviation(value)
        cross[:, step] = off
        both = (np.abs(z_others) > Z) & (np.abs(z_past) > Z) & (np.abs(off) > math.log(SMALL))
        both &= np.sign(z_others) == np.sign(z_past)
        if both.sum() > 1:  # the loudest is the cause: the others were compared with it
            both &= np.abs(z_past) == np.nanmax(np.abs(np.where(both, z_past, np.nan)))
        flagged[:, step] = both
        against_others.take(difference)
        against_past.take(value)
    return flagged, cross


def _others(value: Floats) -> Floats:
    """For each rank the mean of the others; the median where there are at least three others."""
    count = len(value)
    if count > 3:
        everyone = np.nanmedian(value)
        return np.full(count, everyone)  # with so many, leaving one out moves the median by next to nothing
    found = np.full(count, np.nan)
    for rank in range(count):
        rest = np.delete(value, rank)
        if np.isfinite(rest).any():
            found[rank] = np.nanmean(rest)
    return found


def _always_off(window: StepWindow, group: list[int], logs: Floats) -> list[Finding]:
    """A rank that is `PERSISTENT` times away from the others in nearly every step; the louder one of two."""
    complete = logs[:, np.isfinite(logs).all(axis=0)]
    if complete.shape[1] < 2 * WITHIN:
        return []
    typical = np.median(complete, axis=1)
    off = typical - _others(typical)
    worst = int(np.abs(off).argmax()) if len(group) > 2 else int(off.argmax())
    steady = np.mean(
        np.abs(complete[worst] - np.median(np.delete(complete, worst, 0), axis=0)) > math.log(PERSISTENT) / 2
    )
    if abs(off[worst]) < math.log(PERSISTENT) or steady < 0.9:
        return []
    ratio = math.exp(off[worst])
    return [
        Finding(
            "local-gradient-outlier",
            f"the gradient of {ranks_text([group[worst]])} is {_times(ratio)} that of its peers in every step",
            (group[worst],),
            Confidence.POSSIBLE,
            step=int(window.steps[0]),
            evidence=({"what": "local gradient norms", "ratio": ratio, "steps": complete.shape[1]},),
        )
    ]


def _describe(
    window: StepWindow,
    rows: list[int],
    group: list[int],
    rank: int,
    at: npt.NDArray[np.intp],
    cross: Floats,
    norms: Floats,
) -> Finding:
    first = int(at[0])
    ratio = math.exp(float(np.median(cross[at])))
    step = int(window.steps[first])
    shown = {str(r): float(norms[m, first]) for m, r in enumerate(group[:16])}
    many = f"in {len(at)} steps since step {step}" if len(at) > 1 else f"in step {step}"
    return Finding(
        "local-gradient-outlier",
        f"the gradient of {ranks_text([rank])} is {_times(ratio)} what it usually is against its peers, {many}",
        (rank,),
        Confidence.LIKELY,
        step=step,
        expect="",
        evidence=(
            {
                "what": "local gradient norms",
                "step": step,
                "norms": {r: v if math.isfinite(v) else str(v) for r, v in shown.items()},
                "ratio": ratio,
                "steps": [int(window.steps[i]) for i in at[:16]],
            },
        ),
        since_ns=int(window.records["end_ns"][rows[group.index(rank)], first]),
    )


def _times(ratio: float) -> str:
    return f"{ratio:.3g} times" if ratio >= 1 else f"one {1 / ratio:.3g}th of"
