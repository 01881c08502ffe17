"""Ranks that left out an optimizer step which their peers took."""

from __future__ import annotations

from collections.abc import Sequence

from dtobs.detectors.peers import side_by_side
from dtobs.recording.view import RunView

LEAST_STEPS = 8
"""Steps in a row with as many micro-batches on every rank, before one that has more on some."""


def steps_left_out(view: RunView, ranks: Sequence[int]) -> dict[int, int]:
    """By rank the first step in which it left out an optimizer step, {} where none did.

    Steps are told apart by the optimizer, so that the step in which a rank called it holds the micro-batches of the one
    before as well: twice as many as in those before and after, and as on its peers. From then on its steps are numbered
    one less than theirs.
    """
    steps, counts = side_by_side(view, ranks, "micro_batches")
    if len(steps) <= LEAST_STEPS:
        return {}
    unequal = (counts != counts[0]).any(axis=0)
    first = int(unequal.argmax())
    if not unequal.any() or first < LEAST_STEPS:
        return {}
    usual = int(counts[0, first - 1])
    if usual < 1 or (counts[:, first - LEAST_STEPS : first] != usual).any():
        return {}
    there, after = counts[:, first], counts[:, first + 1 : first + 2]
    odd = (there > usual) & (there % usual == 0)
    if not odd.any() or (there[~odd] != usual).any() or (after != usual).any():
        return {}
    return {rank: int(steps[first]) for rank, left in zip(ranks, odd.tolist(), strict=True) if left}
