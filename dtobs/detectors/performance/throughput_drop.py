"""throughput-drop: from some step on, the run does less work a second than before, and stays there.

What it does: takes the work of each step over its time: tokens where the training says how many, else the elements of
its inputs, else steps. It looks for the one step at which the level falls most, with at least `LEAST_STEPS` and
`LEAST_SECONDS` on each side, and tells a fall to below `FALL` of the level before when `SURE` of the steps after it are
slower than most before it. Where steps are short, so many are looked at that those seconds fit in; a fall that the
newest steps do not show any more lasts until their level is back (`lasts`). What changed most at that step is named: a
part of the step on all ranks or on one, garbage collection, processor time, other processes on the host, a device whose
clock fell or that somebody else computes on.

Why it hurts: nobody looks at a run that goes on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dtobs.detectors.performance.devices import device_change
from dtobs.detectors.performance.window import MOST_STEPS, Floats, Times, step_times
from dtobs.findings import Confidence, Finding
from dtobs.recording.ring import STEP_CAPACITY
from dtobs.recording.view import RunView
from dtobs.words import duration_text, ranks_text

LEAST_STEPS, LEAST_SECONDS = 24, 15.0
WINDOW_SECONDS = 60.0
MOST_RECORDS = 128 << 10
"""Of all ranks together, beyond `MOST_STEPS` a rank."""
FALL, SURE = 0.75, 0.9
LEVELS = "work a second"
EXPLAINS = 0.3
_WORDS = {
    "gc": "collecting garbage",
    "throttled": "processor time used up by its container",
    "run_delay": "waiting for a core that others use",
    "exposed": "communication",
    "compile": "compiling",
}


@dataclass(frozen=True)
class _Drop:
    at: int  #: the first step of the lower level, its place in the window
    before: float
    after: float


def throughput_drop(view: RunView) -> list[Finding]:
    """At most one finding, of the whole run."""
    times = _newest(view)
    if times is None or len(times.steps) < 2 * LEAST_STEPS:
        return []
    wall = np.median(times.wall, axis=0)
    unit, work = _work(times)
    drop = _fall(work / np.maximum(wall, 1e-9), wall)
    if drop is None:
        return []
    step, share = int(times.steps[drop.at]), 1 - drop.after / drop.before
    device = device_change(view, int(times.end_ns[:, drop.at].min()), share)
    cause, ranks, longer = ("", (), 0.0) if device else _cause(view, times, drop.at)
    said = f"; most of it is {cause} (+{duration_text(longer)} a step)" if cause else ""
    if device:
        cause, ranks, said = device.name, device.ranks, f": {device.words}"
    return [
        Finding(
            "throughput-drop",
            f"the run is {share:.0%} slower since step {step}{said}",
            ranks,
            Confidence.LIKELY,
            step=step,
            evidence=(
                {
                    "what": LEVELS,
                    "unit": unit,
                    "before": drop.before,
                    "after": drop.after,
                    "steps": len(wall) - drop.at,
                },
                {"what": "what changed", "cause": cause, "seconds_longer": longer},
            ),
            next_step=device.next_step if device else "",
            since_ns=int(times.end_ns[:, drop.at].min()),
        )
    ]


def lasts(view: RunView, finding: Finding) -> bool:
    """Whether the run is still as slow as a finding of this code says, however long ago it fell."""
    times = step_times(view, list(range(len(view.ranks))), last=2 * LEAST_STEPS)
    levels = next((e for e in finding.evidence if e.get("what") == LEVELS), None)
    before = levels.get("before") if levels is not None else None
    if times is None or levels is None or not isinstance(before, int | float):
        return False
    unit, work = _work(times)
    rate = np.median(work / np.maximum(np.median(times.wall, axis=0), 1e-9))
    return unit == levels.get("unit") and bool(rate <= FALL * before)


def _newest(view: RunView) -> Times | None:
    """So many of the newest steps that a fall and the time before it fit in."""
    rows = list(range(len(view.ranks)))
    times = step_times(view, rows, last=MOST_STEPS)
    if times is None or len(times.steps) < MOST_STEPS:
        return times
    wanted = int(WINDOW_SECONDS / max(float(np.median(times.wall)), 1e-9))
    last = min(wanted, STEP_CAPACITY, MOST_RECORDS // len(rows))
    return step_times(view, rows, last=last) if last > MOST_STEPS else times


def _work(times: Times) -> tuple[str, Floats]:
    """float64[steps]: what a step does, in the best unit that is known for all of them."""
    for name in ("tokens", "input_elements", "micro_batches"):
        values = times.records[name].astype(np.float64)
        if (values > 0).all() and np.isfinite(values).all():
            done: Floats = values.sum(axis=0)
            return name, done
    return "steps", np.ones(len(times.steps))


def _fall(rate: Floats, wall: Floats) -> _Drop | None:
    """The step that parts two levels best, when the second is lower for good; None without one."""
    past, ahead = wall.cumsum(), wall[::-1].cumsum()[::-1]
    places = np.arange(len(rate))
    fits = (places >= LEAST_STEPS) & (len(rate) - places >= LEAST_STEPS)
    fits &= (np.concatenate(([0.0], past[:-1])) >= LEAST_SECONDS) & (ahead >= LEAST_SECONDS)
    if not fits.any():
        return None
    # The split that leaves least of the variance of the ranks of the rates: a few odd steps move it little.
    order = rate.argsort(kind="stable").argsort(kind="stable").astype(np.float64)
    sums, total, n = order.cumsum(), float(order.sum()), len(rate)
    left = np.concatenate(([0.0], sums[:-1]))
    between = np.where(places > 0, left**2 / np.maximum(places, 1) + (total - left) ** 2 / (n - places), 0.0)
    at = int(np.where(fits, between, -1.0).argmax())
    before, after = rate[:at], rate[at:]
    low = float(np.quantile(before, 0.1))
    if np.median(after) > FALL * np.median(before) or float((after < low).mean()) < SURE:
        return None
    newest = after[-LEAST_STEPS // 2 :]
    if np.median(newest) > FALL * np.median(before):
        return None  # it is over
    return _Drop(at, float(np.median(before)), float(np.median(after)))


def _cause(view: RunView, times: Times, at: int) -> tuple[str, tuple[int, ...], float]:
    """What became longer, on which ranks, by how many seconds a step; ("", (), 0) when nothing stands out."""

    def more(values: Floats) -> Floats:
        change: Floats = np.median(values[:, at:], axis=1) - np.median(values[:, :at], axis=1)
        return change

    def more_in_all(name: str) -> Floats:
        values = times.seconds(name)
        change: Floats = values[:, at:].mean(axis=1) - values[:, :at].mean(axis=1)
        return change

    slower = float(np.median(more(times.wall)))
    hosts = {name: more_in_all(name) for name in ("throttled", "gc", "run_delay")}
    parts = {name: more(values) for name, values in times.parts.items() if name not in ("validation", "checkpoint")}
    own = sum((v for name, v in parts.items() if name != "exposed"), np.zeros(len(view.ranks)))
    # One rank that works longer makes all others wait: then they are not what changed.
    alone = len(own) > 1 and float(np.sort(own)[-1]) >= EXPLAINS * slower > 2 * abs(float(np.median(np.sort(own)[:-1])))
    ranks = (view.ranks[int(own.argmax())],) if alone else ()
    rows = [int(own.argmax())] if alone else list(range(len(own)))
    for name, change in hosts.items():
        longer = float(np.median(change[rows]))
        if longer >= EXPLAINS * slower:
            return _told(_WORDS[name], ranks), ranks, longer
    name = max(parts, key=lambda part: float(np.median(parts[part][rows])))
    longer = float(np.median(parts[name][rows]))
    return (_told(_WORDS.get(name, name), ranks), ranks, longer) if longer >= EXPLAINS * slower else ("", (), 0.0)


def _told(what: str, ranks: tuple[int, ...]) -> str:
    return f"{what} on {ranks_text(ranks)}" if ranks else what
