"""Lengths of unions of intervals and of what they share, as columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dtobs.timeline.kineto.load import Floats, Spans


def union(spans: Spans) -> Spans:
    """The same time, in order and without overlap."""
    if not len(spans):
        return spans
    order = np.argsort(spans.begin, kind="stable")
    begin, end = spans.begin[order], np.maximum.accumulate(spans.end[order])
    first = np.concatenate([[True], begin[1:] > end[:-1]])
    last = np.concatenate([first[1:], [True]])
    return Spans(begin[first], end[last])


def joined(parts: Sequence[Spans]) -> Spans:
    """All intervals of `parts`, not merged."""
    if not parts:
        return Spans(np.empty(0), np.empty(0))
    return Spans(np.concatenate([p.begin for p in parts]), np.concatenate([p.end for p in parts]))


def length(spans: Spans) -> float:
    """How much time a union takes."""
    return float((spans.end - spans.begin).sum())


def covered(spans: Spans, until: Floats) -> Floats:
    """How much of a union lies before each of the times `until`."""
    if not len(spans):
        return np.zeros(len(until))
    before = np.concatenate([[0.0], np.cumsum(spans.end - spans.begin)])
    row = np.searchsorted(spans.begin, until, side="right") - 1
    safe = np.maximum(row, 0)
    inside = np.minimum(until, spans.end[safe]) - spans.begin[safe]
    return np.where(row < 0, 0.0, before[safe] + np.maximum(inside, 0.0))


def within(spans: Spans, begin: Floats, end: Floats) -> Floats:
    """How much of a union lies in each of the intervals [begin, end]."""
    return np.maximum(covered(spans, end) - covered(spans, np.minimum(begin, end)), 0.0)


def shared(one: Spans, other: Spans) -> float:
    """How much time two unions have in common."""
    return float(within(one, other.begin, other.end).sum())


def gaps(spans: Spans) -> Spans:
    """What lies between the intervals of a union."""
    return Spans(spans.end[:-1], spans.begin[1:])


def clipped(spans: Spans, others: Spans) -> Spans:
    """The parts of the union `spans` inside the union `others`."""
    if not len(spans) or not len(others):
        return Spans(np.empty(0), np.empty(0))
    edges = np.unique(np.concatenate([spans.begin, spans.end, others.begin, others.end]))
    middle = (edges[:-1] + edges[1:]) / 2
    both = _inside(spans, middle) & _inside(others, middle)
    return union(Spans(edges[:-1][both], edges[1:][both]))


def _inside(spans: Spans, at: Floats) -> npt.NDArray[np.bool_]:
    row = np.searchsorted(spans.begin, at, side="right") - 1
    inside: npt.NDArray[np.bool_] = (row >= 0) & (at <= spans.end[np.maximum(row, 0)])
    return inside
