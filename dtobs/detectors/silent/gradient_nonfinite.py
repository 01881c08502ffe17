"""gradient-nonfinite: a rank computed a gradient that holds NaN or infinity.

What it does: looks at each rank's own gradients, before they are reduced, so that it names the ranks that produced the
NaN and not those that received it; the parameter is the first one in model order. Only the first step of a row of bad
steps counts: after it the NaN may be everywhere. With a loss scaler single overflows are its way to find its scale;
then a row of `SCALER_PATIENCE` steps is needed.

Why it hurts: one NaN in one gradient makes every parameter of every rank NaN with the next optimizer step.

What to do next: look at the module named, with the batch of this rank and step.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dtobs.events import NONFINITE_MARK, Kind
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import ranks_do

SCALER_PATIENCE = 10


def gradient_nonfinite(view: RunView) -> list[Finding]:
    """One finding for each set of ranks that produced non-finite gradients."""
    bad = _bad_steps(view)
    found: dict[tuple[int, ...], Finding] = {}
    previous: int | None = None
    for step in sorted(bad):
        if previous is None or step > previous + 1:
            ranks = tuple(sorted(bad[step]))
            found.setdefault(ranks, _describe(view, step, bad[step]))
        previous = step
    return list(found.values())


def _bad_steps(view: RunView) -> dict[int, dict[int, tuple[int, int, int]]]:
    """step → rank → (row of the first bad parameter, number of bad ones, time)."""
    bad: dict[int, dict[int, tuple[int, int, int]]] = {}
    for rank in view.ranks:
        steps = view.rank_steps(rank)
        wrong = steps["nonfinite"] > 0
        if np.isfinite(steps["loss_scale"]).any():
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
        if len(marks) and not np.isfinite(steps["loss_scale"]).any():
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
