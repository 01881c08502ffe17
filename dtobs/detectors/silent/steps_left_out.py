"""Ranks that left out an optimizer step which their peers took."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dtobs.detectors.peers import side_by_side
from dtobs.recording.view import RunView

LEAST_STEPS = 8
"""Steps in a row with as many micro-batches on every rank, or in which all parameters moved, before one that is odd."""
MOST = 0.75
NEXT_STEP = "Look for what skips optimizer.step() on this rank only: a condition on its own loss, gradients or data."


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


def steps_at_rest(view: RunView, ranks: Sequence[int]) -> dict[int, int]:
    """By rank the first step that changed nothing it holds, while it changed what each of its peers holds.

    An optimizer whose gradients are all None does nothing when it is called, and a scaler that found an overflow in
    this rank's part alone does not call it. Told where each step is looked at (`ParameterProbe`), of a rank of which
    most tensors moved in each of the `LEAST_STEPS` steps before and in the one after, and whose backward ran: updates
    that are nearly lost to rounding move a tensor now and then.
    """
    steps, looks = side_by_side(view, ranks, "params_digest")
    if len(ranks) < 2 or len(steps) < LEAST_STEPS + 3 or (np.diff(steps) != 1).any():
        return {}
    moved = looks[:, 1:] != looks[:, :-1]
    alone = ~moved & moved.any(axis=0) & (looks != 0).all(axis=0)[1:]
    found = {}
    for row, at in np.argwhere(alone[:, :-1]).tolist():
        rank, step = ranks[row], int(steps[at + 1])
        if rank not in found and _moves_otherwise(view, rank, step) and _has_gradients(view, rank, step):
            found[rank] = step
    return found


def _moves_otherwise(view: RunView, rank: int, step: int) -> bool:
    """Whether `MOST` of the tensors of `rank` that move did so in each step around `step`, and none in it."""
    history = view.digests(rank)
    newest = {at: row for row, at in enumerate(history["step"].tolist())}
    wanted = range(step - LEAST_STEPS - 1, step + 2)
    if any(at not in newest for at in wanted):
        return False
    digests = history["digest"][[newest[at] for at in wanted]]
    moved = digests[1:] != digests[:-1]
    others = np.delete(moved, LEAST_STEPS, axis=0)
    return bool(not moved[LEAST_STEPS].any() and others.all(axis=0).sum() >= max(1, MOST * others.any(axis=0).sum()))


def _has_gradients(view: RunView, rank: int, step: int) -> bool:
    """Whether the rank's backward ran in `step`, the learning rate was above zero, and most gradients usually are not.

    Where nearly all underflow, a rank of few tensors may well have a step in which all do.
    """
    records = view.rank_steps(rank)
    of_step, zeros = records[records["step"] == step], records["gradient_zeros"]
    known = zeros[np.isfinite(zeros)]
    if len(known) and np.median(known) > MOST:
        return False
    return bool(len(of_step) and of_step["learning_rate"][-1] > 0 and of_step["micro_batches"][-1] > 0)
