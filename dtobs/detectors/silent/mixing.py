"""The mixing matrix: whose gradient reached an optimizer, and with what weight. Pure arithmetic on sketches.

A `Look` holds both sides of the ledger for one tensor in one step. Its pieces are linear, so each is an equation

    final of rank r  =  sum over ranks q and micro-batches m of  weight[r, q, m] * local of (q, m)

In a healthy job all weights of a step are one number, the same for every rank (1/W, or less where gradients were
clipped). `judge` asks, in this order: does one factor explain a rank's gradient? If not, does a simple mistake explain
it exactly: own share only, a share missing, the last micro-batch only (of all ranks or of one), the last micro-batches
not reduced, the shares of a part of the ranks? What nothing explains was transformed on purpose (clipped by value,
compressed, noise) or cannot be known: it is accused of nothing, unless every rank is given something else, which is
called mixed, or shards of it still wait for their reduction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dtobs.recording.laws import Ledger

EXACT = 1e-4
"""Relative error that FP32 arithmetic may leave; measured 1e-6."""
ROUGH = 0.03
"""The same where gradients travel in BF16; measured 1.5e-2 on 4 ranks."""
BETTER = 10.0
"""An explanation has to fit that many times better than the healthy one."""
MOST_PARTS = 512
"""Micro-batches of all ranks together, up to which each is asked whether it alone was wiped."""
LEAST_PIECES = 4
"""Pieces that must hold something before a tensor can be judged by their pattern."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Look:
    """One tensor in one step, over the ranks that share its gradient.

    `local` is float[Q, M, P, K]: rank, micro-batch, shard, piece. `final` is [Q, K] with `final_scale` [Q]; rank number
    i holds shard ``part[i]``.
    """

    step: int
    name: str
    ranks: tuple[int, ...]
    local: Floats
    final: Floats
    final_scale: Floats
    part: npt.NDArray[np.intp]
    flags: npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Explained:
    """What became of rank `rank`'s copy of a tensor, where it is not what it should be.

    `mistake` is "own", "missing", "micro", "own-micro", "one-micro", "late", "group", "zeros" or "mixed"; `which` the
    ranks, the micro-batches that are left (of "one-micro" after the rank that wiped), or those that were not reduced,
    where that is known; `residual` what it leaves unexplained, `uniform` what equal weights leave.
    """

    rank: int
    mistake: str
    which: tuple[int, ...]
    residual: float
    uniform: float


@dataclass(frozen=True)
class Judged:
    """One look: the factor of each rank (NaN where one factor does not explain its gradient) and the mistakes found."""

    step: int
    name: str
    ranks: tuple[int, ...]
    micros: int
    flags: int  #: of all ranks
    factors: Floats
    residuals: Floats
    mistakes: tuple[Explained, ...]
    unexplained: tuple[int, ...]  #: ranks whose gradient is no mixture of what was added


def judge(look: Look) -> Judged:
    """What became of the gradient of `look` on each of its ranks."""
    shares = _by_rank(look)  # [Q of the equation, Q, M, K]
    expected = shares.sum(axis=(1, 2)) / len(look.ranks)
    factors, residuals = _fit(expected[:, None], look)
    factors, residuals = factors[:, 0], residuals[:, 0]
    mistakes, unexplained = [], []
    pieces = (np.abs(shares).sum(axis=(1, 2)) > 0).sum(axis=1)
    known = np.isfinite(look.final).all(axis=1) & np.isfinite(expected).all(axis=1) & (pieces > 0)
    for i in np.flatnonzero(known).tolist():
        if look.final_scale[i] == 0:
            mistakes.append(Explained(look.ranks[i], "zeros", (), 0.0, 1.0))
        elif residuals[i] > EXACT and pieces[i] >= LEAST_PIECES:
            found = _explain(look, shares[i], i, float(residuals[i]))
            if found is not None:
                mistakes.append(found)
            elif residuals[i] > ROUGH:
                unexplained.append(look.ranks[i])
    if len(unexplained) == len(look.ranks) > 1 and _unlike(look):
        waits = len(np.unique(look.part)) > 1 and bool((look.flags & Ledger.HELD_BACK).all())
        left = zip(look.ranks, residuals.tolist(), strict=True)
        mistakes = [Explained(rank, "late" if waits else "mixed", (), residual, residual) for rank, residual in left]
    wrong = {m.rank for m in mistakes} | set(unexplained)
    bad = ~known | (pieces < LEAST_PIECES) | (residuals > ROUGH) | np.array([rank in wrong for rank in look.ranks])
    return Judged(
        look.step,
        look.name,
        look.ranks,
        look.local.shape[1],
        int(np.bitwise_or.reduce(look.flags)),
        np.where(bad, np.nan, factors),
        residuals,
        tuple(mistakes),
        tuple(unexplained),
    )


def _unlike(look: Look) -> bool:
    """Whether ranks that hold the same shard were given gradients that differ, each from that of every other."""
    for part in np.unique(look.part).tolist():
        final = look.final[look.part == part]
        apart = np.linalg.norm(final[:, None] - final, axis=2) + np.diag(np.full(len(final), np.inf))
        if (apart <= ROUGH * np.linalg.norm(final, axis=1)).any():
            return False
    return True


def _by_rank(look: Look) -> Floats:
    """[R, Q, M, K]: for the equation of each rank, what every rank added to the shard that it holds."""
    return np.moveaxis(look.local[:, :, look.part, :], 2, 0)


def _fit(hypotheses: Floats, look: Look, only: int | None = None) -> tuple[Floats, Floats]:
    """The best factor of each of `hypotheses` [R, H, K] for each rank's gradient, and the relative error it leaves."""
    at = slice(None) if only is None else slice(only, only + 1)
    final, scale = look.final[at][:, None], look.final_scale[at][:, None]
    with np.errstate(all="ignore"):
        square = (hypotheses**2).sum(axis=2)
        factor = (final * hypotheses).sum(axis=2) / square
        left = np.sqrt(((final - factor[..., None] * hypotheses) ** 2).sum(axis=2))
        # Where shares nearly cancel, what is left is rounding: measured against the tensor, not against the rest.
        against = np.maximum(np.sqrt((final**2).sum(axis=2)), 1e-3 * scale)
        residual = np.where(square > 0, left / against, np.inf)
    return factor, np.where(np.isfinite(residual), residual, np.inf)


def _explain(look: Look, shares: Floats, i: int, uniform: float) -> Explained | None:
    """The simple mistake that explains the gradient of rank number `i`, the first in the order of `_mistakes`."""
    kinds, which, vectors = [], [], []
    for kind, about, vector in _mistakes(look, shares, i):
        kinds.append(kind)
        which.append(about)
        vectors.append(vector)
    if not vectors:
        return None
    _, residual = _fit(np.array(vectors)[None], look, i)
    best = int(residual[0].argmin())
    left = float(residual[0, best])
    # Of several that fit alike (of two ranks, "own only" is "all but the other"), the first is the simplest.
    alike = int(np.flatnonzero(residual[0] <= max(2 * left, EXACT / 10))[0])
    if left > ROUGH or left * BETTER > uniform:
        return None
    return Explained(look.ranks[i], kinds[alike], which[alike], left, uniform)


def _mistakes(look: Look, shares: Floats, i: int) -> Iterator[tuple[str, tuple[int, ...], Floats]]:
    """What rank number `i` would have been given after each of the known mistakes; `shares` is [Q, M, K]."""
    count, micros, _ = shares.shape
    by_rank, total = shares.sum(axis=1), shares.sum(axis=(0, 1))
    if count > 1:
        yield "own", (look.ranks[i],), by_rank[i]
    for begin in range(micros - 1, 0, -1):  # gradients wiped before micro-batch `begin`
        kept = tuple(range(begin, micros))
        yield "micro", kept, shares[:, begin:].sum(axis=(0, 1))
        if count > 1:
            yield "own-micro", kept, shares[i, begin:].sum(axis=0)
            yield "late", kept, shares[:, :begin].sum(axis=(0, 1)) / count + shares[i, begin:].sum(axis=0)
    for q in range(count) if count > 2 else ():
        yield "missing", (look.ranks[q],), total - by_rank[q]
    for size in range(2, count):
        if count % size == 0:
            first = i - i % size
            yield "group", look.ranks[first : first + size], by_rank[first : first + size].sum(axis=0)
            stride = count // size
            yield "group", look.ranks[i % stride :: stride], by_rank[i % stride :: stride].sum(axis=0)
    if 1 < count <= MOST_PARTS // micros:
        for q, wiped in enumerate(total - shares[:, :-1].cumsum(axis=1)):  # by rank number `q` alone
            for begin, vector in enumerate(wiped, 1):
                yield "one-micro", (look.ranks[q], *range(begin, micros)), vector
