"""straggler: a rank works longer than its peers in nearly every step, and they wait for it.

What it does: compares busy time (the step's wall time minus waiting, validation and checkpoints) of the ranks of a
data-parallel group, step by step, each with the median of the others. A straggler is `RATIO` slower in the median,
slower than `PAIRED` in `SHARE` of at least `LEAST_STEPS` steps, by more than `WASTE` of the step and
`LEAST_SECONDS`, and the others wait at least half of the difference longer than it does. The smaller the difference
is, the longer it must last: `SETTLED_SECONDS` at twice the time of its peers, four times as long at 1.25 times. Never
step times: an all-reduce makes those equal on all ranks. Where the peers themselves spend more than `OVERLOADED` of
their busy time waiting for a core, chance decides who gets one, and that time is left out for all ranks.

Why it hurts: every rank of the job runs at the pace of the slowest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dtobs.detectors.peers import data_groups, rows_of
from dtobs.detectors.performance.cause import OFF_PROCESSOR, Cause, cause_of
from dtobs.detectors.performance.devices import device_cause
from dtobs.detectors.performance.lines import SlowLine, line_of
from dtobs.detectors.performance.loaders import as_slow, pace_of, slower_loader
from dtobs.detectors.performance.window import LEAST_STEPS, MOST_STEPS, OVERLOADED, Floats, Times, step_times
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import duration_text, ranks_text

RATIO, PAIRED, SHARE = 1.25, 1.10, 0.8
WASTE = 0.10
SETTLED_SECONDS = 10.0
"""Another process that takes a core for some seconds slows one rank down by about a half: that is no straggler."""
JUDGED_SECONDS, JUDGED_STEPS = 60.0, 64
"""Judged are the newest steps of that time, or that many, whichever are more."""
MOST_TIMES = 20.0
"""More than that says no more: peers that do next to nothing, or wait for a core whenever they would."""
LEAST_ROUNDS = 12
"""Where a loader has several workers, a step for each of them is judged as one: the first of them waits for all."""
LEAST_SECONDS = 0.01
"""Below that, the operating system's time slices decide who is late on a machine with fewer cores than ranks."""


@dataclass(frozen=True)
class _Slow:
    """A rank that works longer than its peers, and by how many `seconds` a step in the `part` of it that grew most."""

    rank: int
    host: str
    ratio: float
    part: str
    seconds: float
    cause: Cause | None
    line: SlowLine | None
    step: int
    since_ns: int
    evidence: dict[str, object]

    def is_like(self, other: _Slow) -> bool:
        """Whether one thing may be the matter with both."""
        names = [slow.cause.name if slow.cause else "" for slow in (self, other)]
        return self.part == other.part and names[0] == names[1] and 2 * self.seconds >= other.seconds


def straggler(view: RunView) -> list[Finding]:
    """One finding for all ranks with which the same is the matter."""
    slow = []
    for group in data_groups(view):
        times = step_times(view, rows_of(view, group), last=MOST_STEPS)
        if times is None or len(times.steps) < LEAST_STEPS:
            continue
        workers = max((pace.workers for rank in group if (pace := pace_of(view, rank)) is not None), default=1)
        times = _newest(times, LEAST_ROUNDS * workers)
        rounds = times.by_round(workers if len(times.steps) >= LEAST_ROUNDS * workers else 1)
        slow += [one for member in _slow(rounds) if (one := _judge(view, times, rounds, member, group)) is not None]
    alike: list[list[_Slow]] = []
    for one in sorted(slow, key=lambda one: -one.seconds):
        for others in alike:
            if one.is_like(others[0]):
                others.append(one)
                break
        else:
            alike.append([one])
    return [_finding(together) for together in alike]


def _finding(slow: list[_Slow]) -> Finding:
    slowest, slow = slow[0], sorted(slow, key=lambda one: one.rank)
    ranks = tuple(one.rank for one in slow)
    hosts = {one.host for one in slow if one.host}
    who = f"{ranks_text(ranks)} on {hosts.pop()}" if len(hosts) == 1 else ranks_text(ranks)
    longer = f"({slowest.part} +{duration_text(slowest.seconds)} per step)"
    why = f" because {slowest.cause.words}" if slowest.cause else ""
    at = f", most of that at {slowest.line.short}" if slowest.line is not None else ""
    much = f"{slowest.ratio:.2f}" if slowest.ratio < 0.9 * MOST_TIMES else "many"
    if len(slow) == 1:
        text = f"{who} works {much} times as long as its peers {longer}{why}{at}; they wait for it"
    else:
        each = f", each{why}" if why else ""
        text = f"{who} work up to {much} times as long as their peers {longer}{each}{at}; the others wait"
    return Finding(
        "straggler",
        text,
        ranks,
        Confidence.LIKELY,
        step=min(one.step for one in slow),
        evidence=(
            *(one.evidence for one in slow[:16]),
            {"what": "longest part", "part": slowest.part, "seconds_longer": slowest.seconds},
            *([{"what": "cause", "cause": c.name, "seconds": c.seconds}] if (c := slowest.cause) is not None else ()),
            *(one.line.evidence for one in slow[:16] if one.line is not None),
        ),
        next_step=_next_step(slowest),
        since_ns=min(one.since_ns for one in slow),
    )


def _next_step(slowest: _Slow) -> str:
    cause, line = slowest.cause, slowest.line
    if cause is not None and (line is None or cause.name != OFF_PROCESSOR):
        return cause.next_step
    if line is None:
        return ""
    does = "waits for: a file, a sleep, a lock or another thread" if cause is not None else "does"
    return f"Look at what {line.where} {does} on rank {slowest.rank}, and whether it has to be done in each step."


def _slow(times: Times) -> list[int]:
    """Those whose median ratio alone would make them stragglers: all at once, because healthy ranks are many."""
    busy = times.busy
    overloaded = np.median(_medians_of_others(times.delayed / np.maximum(busy, 1e-9)), axis=1) > OVERLOADED
    found = np.zeros(len(busy), bool)
    for chosen, values in ((~overloaded, busy), (overloaded, busy - times.delayed)):
        if chosen.any():
            ratio = np.median(values / np.maximum(_medians_of_others(values), 1e-9), axis=1)
            found |= chosen & ~(ratio < RATIO)
    return np.flatnonzero(found).tolist()


def _judge(view: RunView, times: Times, rounds: Times, member: int, group: Sequence[int]) -> _Slow | None:
    """Whether a rank is slow by the `rounds` of the steps of `times`, and why."""
    rank = group[member]
    busy = rounds.busy
    if np.median(_median_of_others(rounds.delayed / np.maximum(busy, 1e-9), member)) > OVERLOADED:
        busy = busy - rounds.delayed
    own, others = busy[member], _median_of_others(busy, member)
    excess = own - others
    ratio = own / np.maximum(others, rounds.wall[member] / MOST_TIMES)
    waited = _median_of_others(rounds.parts["exposed"], member) - rounds.parts["exposed"][member]
    typical = float(np.median(excess))
    if (
        np.median(ratio) < RATIO
        or float(times.wall[member].sum()) < SETTLED_SECONDS / (float(np.median(ratio)) - 1)
        or np.mean(ratio > PAIRED) < SHARE
        or typical < max(LEAST_SECONDS, WASTE * float(np.median(rounds.wall[member])))
        or float(np.median(waited)) < typical / 2
    ):
        return None
    part, longer = max(
        (
            (p, float(np.median(v[member] - _median_of_others(v, member))))
            for p, v in rounds.parts.items()
            if p != "exposed"
        ),
        key=lambda item: item[1],
    )
    if part == "data" and 2 * len(as_slow(view, rank, group, rounds, member)) >= len(group) - 1:
        return None  # it is the last of many: `data_starved` tells of all
    cause = cause_of(times, rounds, member, typical) or device_cause(view, times, group, member, typical)
    if cause is not None and cause.name == "input":
        cause = slower_loader(view, rank, group, cause)
    share = typical / max(float(np.median(rounds.wall[member])), 1e-9)
    return _Slow(
        rank,
        str(view.meta(rank).process.get("host") or ""),
        float(np.median(ratio)),
        part,
        longer,
        cause,
        line_of(view, rank, group, share),
        int(times.steps[0]),
        int(times.end_ns[member, 0]),
        {
            "what": "busy time",
            "rank": rank,
            "steps": len(times.steps),
            "seconds": float(np.median(own)),
            "peers_seconds": float(np.median(others)),
            "share_of_steps": float(np.mean(ratio > PAIRED)),
            "peers_wait_longer_seconds": float(np.median(waited)),
        },
    )


def _newest(times: Times, least: int) -> Times:
    age = times.wall[0][::-1].cumsum()[::-1]  # seconds from the step's beginning to the end
    keep = (age <= JUDGED_SECONDS) | (np.arange(len(age)) >= len(age) - max(JUDGED_STEPS, least))
    return times.of(keep)


def _median_of_others(values: Floats, member: int) -> Floats:
    median: Floats = np.median(np.delete(values, member, axis=0), axis=0)
    return median


def _medians_of_others(values: Floats) -> Floats:
    """`_median_of_others` of every member, float64[ranks, steps], with one sort."""
    others = len(values) - 1
    ordered = np.sort(values, axis=0)

    def without(place: int) -> Floats:
        """What stands at `place` of the others."""
        found: Floats = np.where(values <= ordered[place], ordered[place + 1], ordered[place])
        return found

    return (without((others - 1) // 2) + without(others // 2)) / 2
