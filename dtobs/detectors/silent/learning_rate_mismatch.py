"""learning-rate-mismatch: ranks that share one model step with different learning rates.

What it does: compares the learning rates of the same steps between the ranks of a data-parallel group, and speaks of
those that are apart in the newest steps. Optimizers that hold a part of the model each (ZeRO) are left out.

Why it hurts: replicas part, or the shards of one model are trained at different speeds.
"""

from __future__ import annotations

import numpy as np

from dtobs.detectors.peers import data_groups, outliers, rows_of
from dtobs.detectors.silent.config_mismatch import settings_of
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import ranks_do, ranks_text

WINDOW = 64
LEAST_STEPS = 2
RELATIVE = 1e-6


def learning_rate_mismatch(view: RunView) -> list[Finding]:
    """One finding for each group of ranks whose learning rates part, and stay apart, in the same steps."""
    found = []
    window = view.steps(WINDOW)
    for group in data_groups(view):
        rows = rows_of(view, group)
        if any(settings_of(view, rank, 1 << 62).get("optimizer shares") for rank in group):
            continue
        rates = np.where(window.valid[rows], window.records["learning_rate"][rows], np.nan)
        whole = np.isfinite(rates).all(axis=0) & (rates > 0).any(axis=0)
        spread = np.zeros(len(window.steps))
        spread[whole] = np.ptp(rates[:, whole], axis=0) / np.abs(rates[:, whole]).max(axis=0)
        apart = whole & (spread > RELATIVE)
        # Up to the newest step that can be compared: what has passed is history.
        newest = np.flatnonzero(whole)[-LEAST_STEPS:]
        if len(newest) < LEAST_STEPS or not apart[newest].all():
            continue
        together = np.flatnonzero(whole & ~apart)
        first = int(np.flatnonzero(apart & (np.arange(len(apart)) > (together[-1] if len(together) else -1)))[0])
        values = {rank: f"{rates[row, first]:.4g}" for row, rank in enumerate(group)}
        odd, majority = outliers({rank: float(rates[row, first]) for row, rank in enumerate(group)})
        others = sorted(set(group) - set(odd))
        step = int(window.steps[first])
        if majority:
            said = f"{ranks_do(odd, 'train')} with learning rate {values[odd[0]]}, the others with {values[others[0]]}"
        else:
            said = f"{ranks_text(odd)} train with different learning rates: " + ", ".join(
                f"rank {rank} {values[rank]}" for rank in odd[:4]
            )
        found.append(
            Finding(
                "learning-rate-mismatch",
                f"{said}, since step {step}",
                tuple(odd),
                Confidence.CERTAIN,
                step=step,
                evidence=({"what": "learning rates", "step": step, "values": {str(r): v for r, v in values.items()}},),
                since_ns=int(window.records["end_ns"][rows, first].max()),
            )
        )
    return found
