"""The idle share of a pipeline: as measured, as the replay says, and as the schedule cannot avoid."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dtobs.recording.plan import Plan
from dtobs.recording.view import RunView
from dtobs.timeline.pipeline import PipelineStep, pipelines, read_steps
from dtobs.timeline.replay import replay

_SPLIT = frozenset({"ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"})
_LOOPED = frozenset({"ScheduleInterleaved1F1B", "ScheduleLoopedBFS"})
_SINGLE = frozenset({"ScheduleGPipe", "Schedule1F1B"})


@dataclass(frozen=True)
class Bubble:
    """Shares of a pipeline's time, 0 to 1; None is "not known".

    `measured` is idle time over the time from the first computation of any rank to the last one of any.
    """

    plan: Plan
    step: int
    measured: float
    by_rank: dict[int, float]
    replayed: float | None
    ideal: float | None


def ideal(plan: Plan) -> float | None:
    """The schedule's own bound, for stages that take equally long and a backward of any length; None without a formula.

    With p ranks, m micro-batches and v stages a rank: GPipe and 1F1B (p−1)/(m+p−1); interleaved and looped
    (p−1)/(vm+p−1); those that split the backward, as torch runs them, (p−1)/(3vm+p−1), with weight gradients as long
    as forwards.
    """
    p, m, v = len(plan.ranks), plan.micro_batches, plan.virtual_stages
    if plan.schedule in _SINGLE:
        return (p - 1) / (m + p - 1)
    if plan.schedule in _LOOPED:
        return (p - 1) / (v * m + p - 1)
    return (p - 1) / (3 * v * m + p - 1) if plan.schedule in _SPLIT else None


def measure(step: PipelineStep) -> Bubble | None:
    """The bubble of one step from its records; None when nothing was computed."""
    compute = step.compute()
    every = [c for chunks in compute.values() for c in chunks]
    if not every:
        return None
    span = max(c.end_ns for c in every) - min(c.begin_ns for c in every)
    if span <= 0:
        return None
    shares = {rank: 1 - sum(c.duration_ns for c in chunks) / span for rank, chunks in compute.items()}
    played = replay(step)
    return Bubble(
        step.plan,
        step.step,
        sum(shares.values()) / len(shares),
        shares,
        played.bubble if played else None,
        ideal(step.plan),
    )


def recent_shares(view: RunView, last: int = 8) -> dict[int, float]:
    """The measured bubble of each rank, the median of its newest `last` steps, from the step history alone.

    Ranks without a pipeline, or whose pipeline has a rank without a record, are left out.
    """
    found: dict[int, float] = {}
    plans = pipelines(view)
    if not plans:
        return found
    window = view.steps(last)
    rows = {rank: row for row, rank in enumerate(view.ranks)}
    for plan in plans:
        if not all(rank in rows for rank in plan.ranks):
            continue
        chosen = [rows[rank] for rank in plan.ranks]
        for rank, share in zip(plan.ranks, _shares(window.records[chosen]), strict=True):
            if not np.isnan(share):
                found[rank] = float(share)
    return found


def latest(view: RunView) -> Bubble | None:
    """The last step of the pipeline whose bubble is the widest of late, replayed; None without a whole step."""
    shares = recent_shares(view)
    plans = [plan for plan in pipelines(view) if all(rank in shares for rank in plan.ranks)]
    if not plans:
        return None
    widest = max(plans, key=lambda plan: sum(shares[r] for r in plan.ranks) / len(plan.ranks))
    steps = read_steps(view, widest)
    return measure(steps[-1]) if steps else None


def _shares(records: npt.NDArray[np.void]) -> npt.NDArray[np.float64]:
    """float64[R] of STEP_DTYPE[R, S] of one pipeline's ranks; NaN where no step has a pipeline on all of them."""
    good = (records["pipeline_end_ns"] > 0).all(axis=0)
    if not good.any():
        return np.full(len(records), np.nan)
    chosen = records[:, good]
    begin = chosen["pipeline_begin_ns"].min(axis=0)
    span = (chosen["pipeline_end_ns"].max(axis=0) - begin).clip(min=1)
    shares: npt.NDArray[np.float64] = np.median(1 - chosen["pipeline_compute_ns"] / span, axis=1)
    return shares
