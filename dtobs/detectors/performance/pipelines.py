"""pipeline-bubble and stage-imbalance: a pipeline's ranks idle for longer than its schedule makes them.

What it does: takes, from the step history, each rank's computation between the first computation of its pipeline and
the last, step by step. `stage-imbalance`: the longest rank computes `LONGER` times as long as the others, and the time
that costs is `LOST` of the step. Where the pipeline has copies, its peers must compute as long: one of them alone is a
straggler. `pipeline-bubble`: idle time is `ABOVE` more than the schedule's own bound, and unequal computation does not
explain it. Both want many steps and seconds, steps of `LEAST_SECONDS`, and a core for every rank.
A pipeline by hand has no schedule that could be watched. Its stages are told from who hands messages on to whom before
it hears from there, and a stage is taken to compute while it does not wait.

Why it hurts: all ranks wait for the longest stage in every micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dtobs.detectors.peers import data_groups, hands_on_to, rows_of
from dtobs.detectors.performance.window import MOST_STEPS, Floats, Times, step_times
from dtobs.findings import Confidence, Finding
from dtobs.recording.plan import Plan
from dtobs.recording.view import RunView
from dtobs.timeline.bubble import ideal
from dtobs.timeline.pipeline import pipelines
from dtobs.words import ranks_text

LONGER, LOST = 1.4, 0.15
ABOVE = 0.15
LEAST_SECONDS = 0.05
ALIKE = 0.25
"""Copies of a stage compute equally long when they differ by less than this share."""


@dataclass(frozen=True)
class _Shares:
    """One pipeline's steps: `compute` float64[ranks, steps] seconds, `span` and idle share `bubble` float64[steps]."""

    plan: Plan
    times: Times
    compute: Floats
    span: Floats
    bubble: Floats


def pipeline_findings(view: RunView) -> list[Finding]:
    """At most one finding a pipeline."""
    found = []
    plans = pipelines(view)
    for plan in plans:
        shares = _shares(view, plan)
        if shares is None:
            continue
        one = _stage_imbalance(view, shares) or _bubble(shares)
        if one is not None:
            found.append(one)
    watched = {rank for plan in plans for rank in plan.ranks}
    for chain in _chains(view, watched):
        shares = _shares_by_hand(view, chain)
        one = _stage_imbalance(view, shares) if shares is not None else None
        if one is not None:
            found.append(one)
    return found


def _chains(view: RunView, watched: set[int]) -> list[list[int]]:
    """The stages of pipelines by hand, in their order; of ranks that are not `watched` and wait for messages.

    Copies of one model exchange keys and values, or halos, by messages too: they are no stages.
    """
    recent = {rank: view.recent_steps(rank, 1) for rank in view.ranks if rank not in watched}
    waiting = {rank for rank, steps in recent.items() if (steps["exposed_pipeline_ns"] > 0).any()}
    if len(waiting) < 2 or not _uneven(view, sorted(waiting)):
        return []
    copies = {rank: set(group) for group in data_groups(view) for rank in group}
    onward = {rank: hands_on_to(view, rank) & waiting - copies.get(rank, set()) for rank in waiting}
    found = []
    for first in waiting - {rank for others in onward.values() for rank in others}:
        chain = [first]
        while len(following := onward[chain[-1]]) == 1 and following.isdisjoint(chain):
            chain.extend(following)
        if len(chain) > 1 and not following:
            found.append(chain)
    return sorted(found)


def _uneven(view: RunView, ranks: list[int]) -> bool:
    """Whether some of `ranks` compute so much longer than others that it is worth knowing who hands on to whom."""
    times = step_times(view, rows_of(view, ranks), last=MOST_STEPS)
    if times is None or not times.settled:
        return False
    typical = np.median(_computing(times), axis=1)
    return bool(typical.max() >= LONGER * typical.min())


def _shares_by_hand(view: RunView, chain: list[int]) -> _Shares | None:
    times = step_times(view, rows_of(view, chain), last=MOST_STEPS)
    if times is None or not times.settled or times.overloaded or not (times.parts["backward"] > 0).all():
        return None
    span = times.wall.max(axis=0)
    if float(np.median(span)) < LEAST_SECONDS:
        return None
    compute = _computing(times)
    plan = Plan("", 0, (), len(chain), tuple(chain))
    return _Shares(plan, times, compute, span, 1 - compute.mean(axis=0) / span)


def _computing(times: Times) -> Floats:
    """Seconds that each rank computes in each step, as its schedule shows or, by hand, while it waits for nobody."""
    seen: Floats = np.nan_to_num(times.seconds("pipeline_compute"))
    return seen if (seen > 0).any() else times.busy - times.parts["data"] - times.parts["compile"]


def _shares(view: RunView, plan: Plan) -> _Shares | None:
    if len(plan.ranks) < 2 or not set(plan.ranks) <= set(view.ranks):
        return None
    times = step_times(view, rows_of(view, plan.ranks), last=MOST_STEPS)
    if times is None:
        return None
    whole: npt.NDArray[np.bool_] = np.all(times.records["pipeline_end_ns"] > 0, axis=0)
    times = times.of(whole)
    if not len(times.steps) or not times.settled or times.overloaded:
        return None
    records = times.records
    span = (records["pipeline_end_ns"].max(axis=0) - records["pipeline_begin_ns"].min(axis=0)) / 1e9
    compute = _computing(times)
    if float(np.median(span)) < LEAST_SECONDS:
        return None
    return _Shares(plan, times, compute, span, 1 - compute.mean(axis=0) / np.maximum(span, 1e-9))


def _stage_imbalance(view: RunView, shares: _Shares) -> Finding | None:
    typical = np.median(shares.compute, axis=1)
    longest = int(typical.argmax())
    others = float(np.mean(np.delete(typical, longest)))
    ratio = float(typical[longest]) / max(others, 1e-9)
    lost = (float(typical[longest]) - float(typical.mean())) / float(np.median(shares.span))
    if ratio < LONGER or lost < LOST:
        return None
    rank = shares.plan.ranks[longest]
    peers = next((group for group in data_groups(view) if rank in group), [rank])
    if not _alike(view, peers):
        return None
    stage = f"stage {shares.plan.ranks.index(rank)}" if shares.plan.virtual_stages == 1 else "its stages"
    what = f"{ranks_text(peers)} ({stage})"
    return Finding(
        "stage-imbalance",
        f"{what} computes {ratio:.2f} times as long as the rest of the pipeline: {lost:.0%} of each step is lost to it",
        tuple(peers),
        Confidence.LIKELY if len(peers) > 1 else Confidence.POSSIBLE,
        step=int(shares.times.steps[0]),
        evidence=(
            {
                "what": "computation of a step by rank of the pipeline",
                "seconds": [round(float(t), 6) for t in typical],
                "ranks": list(shares.plan.ranks),
                "lost_share": lost,
            },
        ),
        since_ns=int(shares.times.end_ns[0, 0]),
    )


def _alike(view: RunView, peers: list[int]) -> bool:
    """Whether all copies of the stage compute equally long: else it is the rank, not the stage."""
    if len(peers) < 2:
        return True
    times = step_times(view, rows_of(view, peers), last=MOST_STEPS)
    if times is None:
        return False
    typical = np.median(_computing(times), axis=1)
    return bool(typical.max() <= (1 + ALIKE) * max(float(typical.min()), 1e-9))


def _bubble(shares: _Shares) -> Finding | None:
    own = ideal(shares.plan)
    measured = float(np.quantile(shares.bubble, 0.25))
    if own is None:
        return None
    # What the longest stage alone makes the others wait belongs to the stages, and stage 0 may have less to do.
    typical = np.median(shares.compute, axis=1)
    uneven = 1 - float(typical.mean() / max(float(typical.max()), 1e-9))
    expected = 1 - (1 - own) * (1 - uneven)
    if measured < expected + ABOVE:
        return None
    schedule = shares.plan.schedule.removeprefix("Schedule")
    return Finding(
        "pipeline-bubble",
        f"the pipeline of {ranks_text(shares.plan.ranks)} idles {measured:.0%} of the time; {schedule} with"
        f" {shares.plan.micro_batches} micro-batches needs {own:.0%}, its unequal stages {expected:.0%}",
        shares.plan.ranks,
        Confidence.LIKELY,
        step=int(shares.times.steps[0]),
        evidence=(
            {
                "what": "idle share",
                "measured": measured,
                "schedule": own,
                "with_these_stages": expected,
                "steps": len(shares.times.steps),
            },
        ),
        since_ns=int(shares.times.end_ns[0, 0]),
    )
