"""resume-mismatch: a restart goes on with another learning rate, or from other weights.

What it does: compares the steps that a restart does again with the attempt before, where they read the same data: the
learning rate of each, and the loss, which must lie within what the steps before it vary by. A job that reads other
data after its restart is not judged; in one that counts its steps anew, the data tells which steps are the same.

Why it hurts: a scheduler that starts over warms up again; weights or optimizer state that were not loaded undo what
was learned.
"""

from __future__ import annotations

import numpy as np

from dtobs.detectors.silent.restarts import Redone, redone
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import ranks_text

RELATIVE = 1e-6
DEVIATIONS = 6.0


def resume_mismatch(view: RunView) -> list[Finding]:
    """One finding for the learning rate and one for the loss, each with all its ranks."""
    pairs = [pair for pair in redone(view) if pair.same_inputs()]
    rates = {p.rank: p for p in pairs if _rates_differ(p)}
    losses = {p.rank: p for p in pairs if _loss_is_higher(p)}
    found = []
    for name, whose, words in (
        ("learning_rate", rates, "learning rate"),
        ("loss", losses, "a higher loss"),
    ):
        if whose:
            pair = next(iter(whose.values()))
            step, then, now = int(pair.after["step"][0]), float(pair.before[name][0]), float(pair.after[name][0])
            found.append(
                Finding(
                    "resume-mismatch",
                    f"step {step}, done again after a restart, has {words} {now:.4g} where it had {then:.4g}, on"
                    f" {ranks_text(whose)}",
                    tuple(whose),
                    Confidence.LIKELY,
                    step=step,
                    group=words,
                    fault=name == "loss",
                    evidence=(
                        {
                            "what": f"{name} of steps done again",
                            "before": [float(v) for v in pair.before[name][:16]],
                            "after": [float(v) for v in pair.after[name][:16]],
                        },
                    ),
                )
            )
    return found


def _rates_differ(pair: Redone) -> bool:
    before, after = pair.before["learning_rate"], pair.after["learning_rate"]
    if not (np.isfinite(before).all() and np.isfinite(after).all()):
        return False
    largest = np.maximum(np.abs(before), np.abs(after))
    return bool((np.abs(before - after) > RELATIVE * largest).all())


def _loss_is_higher(pair: Redone) -> bool:
    """Every loss is above the one before by more than `DEVIATIONS` times what neighbouring steps differ by."""
    before, after = pair.before["loss"], pair.after["loss"]
    usual = pair.earlier["loss"][np.isfinite(pair.earlier["loss"])]
    if not (np.isfinite(before).all() and np.isfinite(after).all()) or len(usual) < 2 * len(before):
        return False
    noise = float(np.median(np.abs(np.diff(usual)))) + 1e-6 * float(np.abs(usual).max())
    return bool((after - before > DEVIATIONS * noise).all())
