"""learning-rate-mismatch: ranks that share one model step with different learning rates.

What it does: compares the learning rates of the same steps between ranks that train one model (data-parallel ones, else
tensor-parallel ones or those whose copies were alike), and speaks of those that are apart in the newest steps. Of
optimizers that hold a part of the model each (ZeRO) only rates that were equal before are compared. Left out are ranks
that left out an optimizer step: their steps have other numbers.

Why it hurts: replicas part, or the shards of one model are trained at different speeds.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dtobs.detectors.peers import data_groups, outliers, rows_of, tensor_groups
from dtobs.detectors.silent.config_mismatch import settings_of
from dtobs.detectors.silent.replicas import replica_sets
from dtobs.detectors.silent.steps_left_out import steps_left_out
from dtobs.findings import Confidence, Finding
from dtobs.recording.step_window import StepWindow
from dtobs.recording.view import RunView
from dtobs.words import ranks_do, ranks_text

WINDOW = 64
HISTORY = 1024
"""Steps that are read to find the first, once the newest are apart."""
LEAST_STEPS = 2
LEAST_TOGETHER = 8
RELATIVE = 1e-6


def learning_rate_mismatch(view: RunView) -> list[Finding]:
    """One finding for each group of ranks whose learning rates part, and stay apart, in the same steps."""
    return [found for group in sharers(view) if (found := _judge(view, group)) is not None]


def sharers(view: RunView) -> list[list[int]]:
    """Groups of ranks that train one model: data ranks, or tensor ranks where no data ranks are known.

    Ranks whose copies were alike until they parted for good are such a group, too. Copies that meet again and again
    are those of a population, whose members may learn at rates of their own.
    """
    groups = data_groups(view) or tensor_groups(view)
    known = [set(group) for group in groups]
    for copies in replica_sets(view):
        apart: npt.NDArray[np.bool_] = np.any(copies.differs, axis=1)
        once = bool(apart[-1]) and not apart[0] and not (apart[:-1] & ~apart[1:]).any()
        if once and not any(set(copies.ranks) <= group for group in known):
            groups, known = [*groups, copies.ranks], [*known, set(copies.ranks)]
    return groups


def _judge(view: RunView, group: list[int]) -> Finding | None:
    shared = any(settings_of(view, rank, 1 << 62).get("optimizer shares") for rank in group)
    if _parted(view.steps(WINDOW), rows_of(view, group), shared) is None:
        return None
    group = [rank for rank in group if rank not in steps_left_out(view, group)]
    rows = rows_of(view, group)
    window = view.steps(HISTORY)
    parted = _parted(window, rows, shared) if len(group) > 1 else None
    if parted is None:
        return None
    rates = window.records["learning_rate"][rows, parted]
    values = {rank: f"{rate:.4g}" for rank, rate in zip(group, rates, strict=True)}
    of_all = window.records["learning_rate"][:, parted][window.valid[:, parted]]
    odd, majority = outliers({rank: float(rate) for rank, rate in zip(group, rates, strict=True)}, of_all.tolist())
    others = sorted(set(group) - set(odd))
    step = int(window.steps[parted])
    if majority:
        said = f"{ranks_do(odd, 'train')} with learning rate {values[odd[0]]}, the others with {values[others[0]]}"
    else:
        said = f"{ranks_text(odd)} train with different learning rates: " + ", ".join(
            f"rank {rank} {values[rank]}" for rank in odd[:4]
        )
    return Finding(
        "learning-rate-mismatch",
        f"{said}, since step {step}",
        tuple(odd),
        Confidence.CERTAIN,
        step=step,
        evidence=({"what": "learning rates", "step": step, "values": {str(r): v for r, v in values.items()}},),
        since_ns=int(window.records["end_ns"][rows, parted].max()),
    )


def _parted(window: StepWindow, rows: list[int], shared: bool) -> int | None:
    """The column from which on the rates of `rows` are apart, up to the newest that can be compared; None for none.

    Optimizers that step in turn have rates of their own. `shared`: each rank trains a part of the model.
    """
    optimizers = window.records["optimizers"][rows]
    for turn in np.unique(optimizers[0, window.valid[rows].all(axis=0)]).tolist():
        mine = window.valid[rows] & (optimizers == turn).all(axis=0)
        rates = np.where(mine, window.records["learning_rate"][rows], np.nan)
        whole = np.isfinite(rates).all(axis=0) & (rates > 0).any(axis=0)
        spread = np.zeros(len(window.steps))
        spread[whole] = np.ptp(rates[:, whole], axis=0) / np.abs(rates[:, whole]).max(axis=0)
        apart = whole & (spread > RELATIVE)
        newest = np.flatnonzero(whole)[-LEAST_STEPS:]
        if len(newest) < LEAST_STEPS or not apart[newest].all():
            continue  # what has passed is history
        known = np.flatnonzero(whole)
        equal = ~apart[known]
        # Alike in two steps on end: curves that merely cross are equal in one.
        together = known[equal & (np.append(equal[1:], False) | np.append(False, equal[:-1]))]
        if shared and equal.sum() < LEAST_TOGETHER:
            continue  # each part may have a rate of its own
        since = together[-1] + 1 if len(together) else 0
        return int(np.flatnonzero(apart[since:])[0] + since)
    return None
