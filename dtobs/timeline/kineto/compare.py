"""Two sets of traces, before and after: what became faster or slower (``dtobs.trace-compare/1``)."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from dtobs.timeline.kineto.analyse import JobTrace
from dtobs.timeline.kineto.figures import Figures
from dtobs.words import ranks_text

SCHEMA = "dtobs.trace-compare/1"
NOISE = 0.03
"""A step must change by this share for a verdict; twice of it where there are fewer than three steps on a side."""
CATEGORIES = ("compute", "exposed", "memory", "idle")
"""What the span of a rank is made of."""
SAME_CALLS = 1.1
"""Windows begin and end anywhere: the ratios of the counts of calls may differ by this."""
TOP = 10


def compare(before: JobTrace, after: JobTrace) -> dict[str, Any]:
    """What changed, as JSON; `a` is before, `b` after."""
    common = sorted(set(before.figures) & set(after.figures))
    notes = []
    if only := sorted(set(before.figures) ^ set(after.figures)):
        notes.append(f"only in one of the two: {ranks_text(only)}")
    stepped = bool(common) and all(t.figures[r].steps > 0 for t in (before, after) for r in common)
    if not stepped:
        notes.append("not both have ProfilerSteps: the windows are compared as they are")
    a, b = (_pace(t, common, stepped) for t in (before, after))
    change = (b - a) / a if a else 0.0
    if not stepped and (more := _times_the_calls(before, after, common)):
        if more != 1:
            notes[-1] = (
                f"not both have ProfilerSteps: B has {more:.3g} times A's collectives, its time is divided by that"
            )
        change = (b / more - a) / a if a else 0.0
    few = stepped and any(f.steps < 3 for t in (before, after) for f in _of(t, common))
    verdict = "same" if abs(change) < NOISE * (1 + few) else "better" if change < 0 else "worse"
    return {
        "schema": SCHEMA,
        "ranks": {str(r): _rank(before.figures[r], after.figures[r]) for r in common},
        "verdict": verdict,
        "change_percent": round(100 * change, 2),
        "categories": _categories(before, after, common, stepped),
        "step_us" if stepped else "span_us": {"a": round(a, 3), "b": round(b, 3)},
        "kernels": _changes(_kernels(before, common, stepped), _kernels(after, common, stepped)),
        "collectives": _changes(_collectives(before, common, stepped), _collectives(after, common, stepped)),
        "findings": [],
        "notes": notes + [f"only {side}: {summary}" for side, summary in _verdicts(before, after)],
    }


def _pace(trace: JobTrace, ranks: list[int], stepped: bool) -> float:
    """What a step takes, else the whole window."""
    return float(np.mean([f.step if stepped else f.span for f in _of(trace, ranks)])) if ranks else 0.0


def _share(figure: Figures, stepped: bool) -> float:
    """By what to take a sum over the window to have that of a step."""
    return figure.step / figure.span if stepped and figure.span else 1.0


def _categories(a: JobTrace, b: JobTrace, ranks: list[int], stepped: bool) -> dict[str, dict[str, float]]:
    """What a step of a rank is made of, else its window; the mean of the ranks in microseconds."""

    def mean(trace: JobTrace, name: str) -> float:
        values = [(getattr(f, name) or 0.0) * _share(f, stepped) for f in _of(trace, ranks)]
        return round(float(np.mean(values)), 3) if values else 0.0

    return {f"{name}_us": {"a": mean(a, name), "b": mean(b, name)} for name in CATEGORIES}


def _verdicts(before: JobTrace, after: JobTrace) -> list[tuple[str, str]]:
    """What was found of one side alone."""
    sides = (("A", before, after), ("B", after, before))
    known = {id(t): {(f.code, f.ranks) for f in t.findings} for t in (before, after)}
    return [
        (name, f.summary) for name, t, other in sides for f in t.findings if (f.code, f.ranks) not in known[id(other)]
    ]


def _of(trace: JobTrace, ranks: list[int]) -> list[Figures]:
    return [trace.figures[r] for r in ranks]


def _rank(a: Figures, b: Figures) -> dict[str, dict[str, float | None]]:
    names = ("span", "compute", "communication", "exposed", "memory", "idle")
    found: dict[str, dict[str, float | None]] = {}
    for name in names:
        found[f"{name}_us"] = {"a": _rounded(getattr(a, name)), "b": _rounded(getattr(b, name))}
    found["overlap_percent"] = {"a": _rounded(a.overlap_percent), "b": _rounded(b.overlap_percent)}
    for kind in a.idle_by:
        found[f"idle_{kind}_us"] = {"a": _rounded(a.idle_by[kind]), "b": _rounded(b.idle_by[kind])}
    return found


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _kernels(trace: JobTrace, ranks: list[int], stepped: bool) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for figure in _of(trace, ranks):
        for name, _, _, time in figure.kernels:
            found[name] += time / len(ranks) * _share(figure, stepped)
    return found


def _collectives(trace: JobTrace, ranks: list[int], stepped: bool) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for call in trace.collectives:
        for rank, (_, _, time, _) in call.by_rank.items():
            if rank in ranks:
                found[f"{call.op} {call.group}".strip()] += time / len(ranks) * _share(trace.figures[rank], stepped)
    return found


def _times_the_calls(before: JobTrace, after: JobTrace, ranks: list[int]) -> float | None:
    """How many times the calls of `before` a window without steps makes; None where not all collectives agree."""
    a, b = (
        {(c.op, c.group): sum(c.by_rank[r][0] for r in ranks if r in c.by_rank) for c in t.collectives}
        for t in (before, after)
    )
    ratios = [b.get(key, 0) / count for key, count in a.items() if count]
    if not ratios or set(a) != set(b) or min(ratios) <= 0 or max(ratios) > min(ratios) * SAME_CALLS:
        return None
    return float(np.median(ratios))


def _changes(a: dict[str, float], b: dict[str, float]) -> list[dict[str, Any]]:
    """What changed most, by name: microseconds a rank and step."""
    names = sorted(set(a) | set(b), key=lambda n: (-abs(b.get(n, 0.0) - a.get(n, 0.0)), n))[:TOP]
    return [{"name": n, "a": round(a.get(n, 0.0), 3), "b": round(b.get(n, 0.0), 3)} for n in names]
