"""gradient-nonfinite: a rank computed a gradient that holds NaN or infinity.

What it does: looks at each rank's own gradients, before they are reduced, so that it names the ranks that produced the
NaN and not those that received it; the parameter is the first one in model order. Only the first step of a row of bad
steps counts: after it the NaN may be everywhere. Where the parameters held a NaN before, or only the gradient that the
optimizer was given shows it, nobody is accused: it arose in a tensor that was not sampled, in or before that step. With
a loss scaler single overflows are its way to find its scale; then a row of `SCALER_PATIENCE` steps is needed.

Why it hurts: one NaN in one gradient makes every parameter of every rank NaN with the next optimizer step.

What to do next: look at the module named, with the batch of this rank and step.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dtobs.events import BAD_PARAMETERS_MARK, BAD_REDUCED_MARK, NONFINITE_MARK, Kind
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import ranks_do

SCALER_PATIENCE = 10


def gradient_nonfinite(view: RunView) -> list[Finding]:
    """One finding for each set of ranks that produced non-finite gradients."""
    bad = _bad_steps(view)
    found: dict[tuple[int, ...], Finding] = {}
    previous: int | None = None
    unseen = _first_unseen(view)
    if unseen is not None and (not bad or unseen[0] < min(bad)):
        return [_of_nobody(view, *unseen)]
    for step in sorted(bad):
        if previous is None or step > previous + 1:
            ranks = tuple(sorted(bad[step]))
            found.setdefault(ranks, _describe(view, step, bad[step]))
        previous = step
    return list(found.values())


def _first_unseen(view: RunView) -> tuple[int, int, int, bool] | None:
    """The first step by which a NaN was there that no rank was seen to compute: step, rank, row, in that step itself.

    A mark of the parameters is of a step that began with the NaN; one of the reduced gradient is of the step itself.
    """
    first: tuple[int, int, int, bool] | None = None
    for rank in view.ranks:
        if _has_scaler(view, rank):
            continue
        events = view.events(rank)
        marks = events[events["kind"] == Kind.MARK]
        for op, itself in ((BAD_REDUCED_MARK, True), (BAD_PARAMETERS_MARK, False)):
            for mark in marks[marks["op"] == op][:1]:
                known = (int(mark["step"]), rank, int(mark["seq"]), itself)
                at = known[0] if itself else known[0] - 1
                if first is None or at < (first[0] if first[3] else first[0] - 1):
                    first = known
    if first is None:
        return None
    step, rank, row, itself = first
    return (step if itself else step - 1, rank, row, itself)


def _of_nobody(view: RunView, step: int, rank: int, row: int, itself: bool) -> Finding:
    table = view.meta(rank).params
    parameter = table[row].name if 0 <= row < len(table) else "an unknown parameter"
    if itself:
        summary = f"the gradient of {parameter} is NaN or infinite in step {step}, first seen after it was reduced"
    else:
        summary = f"a NaN arose in or before step {step}: {parameter} held one when step {step + 1} began"
    summary += "; which rank computed it was not sampled"
    evidence = {"what": "reduced gradient" if itself else "parameters", "step": step, "parameter": parameter}
    return Finding("gradient-nonfinite", summary, (), Confidence.CERTAIN, step=step, evidence=(evidence,))


def _has_scaler(view: RunView, rank: int) -> bool:
    """Whether a loss scaler is at work: overflows are then its way to find its scale."""
    return bool(view.meta(rank).process.get("loss_scaler")) or bool(
        np.isfinite(view.rank_steps(rank)["loss_scale"]).any()
    )


def _bad_steps(view: RunView) -> dict[int, dict[int, tuple[int, int, int]]]:
    """step → rank → (row of the first bad parameter, number of bad ones, time)."""
    bad: dict[int, dict[int, tuple[int, int, int]]] = {}
    for rank in view.ranks:
        steps = view.rank_steps(rank)
        wrong = steps["nonfinite"] > 0
        scaler = _has_scaler(view, rank)
        if scaler:
            wrong &= _in_long_rows(wrong, SCALER_PATIENCE)
        for record in steps[wrong]:
            bad.setdefault(int(record["step"]), {})[rank] = (
                int(record["nonfinite_param"]),
                int(record["nonfinite"]),
                int(record["end_ns"]),
            )
        last = int(steps["step"].max()) if len(steps) else -1
        marks = view.events(rank)
        marks = marks[
            (marks["kind"] == Kind.MARK) & (marks["op"] == NONFINITE_MARK) & (marks["step"].astype(int) > last)
        ]
        if len(marks) and not scaler:
            # The step was never finished: an exception ended it, or it goes on at this moment.
            first = marks[marks["step"] == marks["step"].min()]
            bad.setdefault(int(first["step"][0]), {})[rank] = (
                int(first["seq"].min()),
                len(first),
                int(first["t_ns"].min()),
            )
    return bad


def _in_long_rows(wrong: npt.NDArray[np.bool_], least: int) -> npt.NDArray[np.bool_]:
    """Those of the True that stand in a row of at least `least`."""
    kept = np.zeros_like(wrong)
    begin = None
    for place, value in enumerate([*wrong.tolist(), False]):
        if value and begin is None:
            begin = place
        elif not value and begin is not None:
            kept[begin:place] = place - begin >= least
            begin = None
    return kept


def _describe(view: RunView, step: int, bad: dict[int, tuple[int, int, int]]) -> Finding:
    rank = min(bad, key=lambda r: (bad[r][0] < 0, bad[r][0], r))
    row, count, _ = bad[rank]
    table = view.meta(rank).params
    parameter = table[row].name if 0 <= row < len(table) else "an unknown parameter"
    module = parameter.rpartition(".")[0] or "the root module"
    more = f" and {count - 1} more parameters" if count > 1 else ""
    evidence = [
        {
            "what": "local gradient",
            "rank": r,
            "step": step,
            "parameter_row": bad[r][0],
            "nonfinite": bad[r][1],
        }
        for r in sorted(bad)[:16]
    ]
    return Finding(
        "gradient-nonfinite",
        f"{ranks_do(list(bad), 'compute')} NaN or infinity in step {step}: first in the gradient of {parameter}{more}",
        tuple(bad),
        Confidence.CERTAIN,
        step=step,
        evidence=(
            *evidence,
            {"what": "first parameter", "rank": rank, "parameter": parameter, "module": module},
        ),
        since_ns=min(t for _, _, t in bad.values()),
    )
