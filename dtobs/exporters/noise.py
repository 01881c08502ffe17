"""The gradient noise scale B_simple of McCandlish et al. (2018), in tokens: beyond it a larger batch gains little.

It wants the squared norm of the gradient at two batch sizes: of one data rank, and of all. Small models have both
norms, read whole in the same step, every few steps. Of large ones they are read too seldom; there the gradient ledger
has sketches of a few rows a step, whose squares estimate squared norms and whose mean over ranks is that of the whole
batch's gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from dtobs.detectors.silent.ledger_looks import looks
from dtobs.recording.view import RunView

STEPS = 512
LEAST_STEPS = 8
"""Steps of which both norms are known."""
LEAST_LOOKS = 64
MOST_RANKS = 64
"""Data ranks beyond which the ledger is too much to read at every scrape."""
_WINDOW = 1 << 14
"""Elements of a tensor that one sketch covers at most."""


def noise_scale(view: RunView) -> float | None:
    """B_simple over the last steps; None where too little is known, or the gradient is nothing but noise."""
    said = [view.meta(rank).layout.get("data_ranks") or () for rank in view.ranks]
    peers = set(max(said, key=len, default=()))
    rows = [row for row, rank in enumerate(view.ranks) if rank in peers]
    if len(rows) < 2 or len(rows) < len(peers):
        return None
    first = view.recent_steps(view.ranks[rows[0]], STEPS)
    both = np.isfinite(first["local_norm"]) & np.isfinite(first["reduced_norm"])
    if len(rows) > MOST_RANKS and both.sum() < LEAST_STEPS:
        return None  # before the records of thousands of ranks are copied
    window = view.steps(STEPS).complete()
    tokens = window.field("tokens")[rows]
    if not tokens.size or not (tokens > 0).any():
        return None
    batch = float(tokens[tokens > 0].mean())
    local, reduced = window.field("local_norm")[rows], window.field("reduced_norm")[rows]
    good = np.isfinite(local).all(0) & np.isfinite(reduced).all(0) & (tokens > 0).all(0)
    if good.sum() >= LEAST_STEPS:
        squares = float((local[:, good] ** 2).mean()), float((reduced[0, good] ** 2).mean())
    else:
        squares = _of_sketches(view, len(rows))
    return _simple(*squares, batch, batch * len(rows))


def _of_sketches(view: RunView, ranks: int) -> tuple[float, float]:
    """The two squares, up to one factor, which their ratio does not need; NaN where too little was looked at."""
    if ranks > MOST_RANKS:
        return math.nan, math.nan
    sizes = {p.name: math.prod(p.shape) for rank in view.ranks for p in view.meta(rank).params}
    squares = list(_squares(view, ranks, sizes))
    if len(squares) < LEAST_LOOKS:
        return math.nan, math.nan
    small, big = np.sum(squares, axis=0).tolist()
    return small, big


def _squares(view: RunView, ranks: int, sizes: dict[str, int]) -> Iterator[tuple[float, float]]:
    """Of each look at a tensor: the mean square of the ranks' gradients, and the square of their mean."""
    for look in looks(view):
        gradient = look.local.sum(axis=1)  # over micro-batches
        if len(look.ranks) != ranks or not np.isfinite(gradient).all():
            continue
        weight = max(1.0, sizes.get(look.name, 0) / _WINDOW)  # for what the window leaves out
        yield weight * float((gradient**2).sum()) / ranks, weight * float((gradient.mean(axis=0) ** 2).sum())


def _simple(small: float, big: float, small_batch: float, big_batch: float) -> float | None:
    signal = (big_batch * big - small_batch * small) / (big_batch - small_batch)
    noise = (small - big) / (1 / small_batch - 1 / big_batch)
    return noise / signal if signal > 0 and noise > 0 else None
