"""resume-mismatch: a restart goes on with another learning rate, from other weights or without optimizer state.

What it does: compares the steps that a restart does again with the attempt before, where they read the same data: the
learning rate of each, the loss, which must lie within what the steps before it vary by, and the norm of the gradients,
whose ratio must be near 1 for what it varies by from step to step. A job that reads other data after its restart is
not judged; in one that counts its steps anew, the data tells which steps are the same. And an optimizer that kept
moments or a momentum before must not begin without them in the midst of the data.

Why it hurts: a scheduler that starts over warms up again; weights or optimizer state that were not loaded undo what
was learned.
"""

from __future__ import annotations

import numpy as np

from dtobs.detectors.silent.restarts import LEAST_STEPS, Redone, before, optimizer_states, redone
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import ranks_do, ranks_text

RELATIVE = 1e-6
DEVIATIONS = 6.0
LEAST_RATIO = 1.5


def resume_mismatch(view: RunView) -> list[Finding]:
    """One finding for each quantity that differs, with all its ranks."""
    pairs = [pair for pair in redone(view) if pair.same_inputs()]
    rates = {p.rank: p for p in pairs if _rates_differ(p)}
    losses = {p.rank: p for p in pairs if _loss_is_higher(p)}
    norms = {p.rank: p for p in pairs if not losses and _gradients_are_others(p)}
    found = []
    for name, whose, words in (
        ("learning_rate", rates, "learning rate"),
        ("loss", losses, "a higher loss"),
        ("local_norm", norms, "a gradient norm of"),
    ):
        if whose:
            pair = next(iter(whose.values()))
            known = np.isfinite(pair.before[name]) & np.isfinite(pair.after[name])
            then, now = pair.before[known], pair.after[known]
            step = int(now["step"][0])
            found.append(
                Finding(
                    "resume-mismatch",
                    f"step {step}, done again after a restart, has {words} {now[name][0]:.4g} where it had"
                    f" {then[name][0]:.4g}, on {ranks_text(whose)}",
                    tuple(whose),
                    Confidence.LIKELY,
                    step=step,
                    group=words,
                    fault=name != "learning_rate",
                    evidence=(
                        {
                            "what": f"{name} of steps done again",
                            "before": then[name][:16].tolist(),
                            "after": now[name][:16].tolist(),
                        },
                    ),
                )
            )
    return [*found, *_without_state(view)]


def _without_state(view: RunView) -> list[Finding]:
    """One finding for the ranks whose optimizers went on in the midst of the data without what they had kept."""
    lost: dict[int, list[str]] = {}
    step = 0
    for pair in redone(view):
        earlier = before(view, pair.rank)
        if earlier is None or (pair.numbered and int(pair.begun["step"][0]) <= 1) or not len(pair.begun):
            continue
        then, now = optimizer_states(earlier.meta), optimizer_states(view.meta(pair.rank))
        names = [name for name, states in then.items() if "kept" in states and now.get(name, [""])[0] == "empty"]
        if names:
            lost[pair.rank] = [name.removesuffix(" state") for name in names]
            step = int(pair.begun["step"][0])
    if not lost:
        return []
    names = next(iter(lost.values()))
    return [
        Finding(
            "resume-mismatch",
            f"{ranks_do(lost, 'have')} gone on at step {step} after a restart without the state of"
            f" {' and '.join(f'the {name}' for name in names[:4])}, such as the moments of Adam",
            tuple(lost),
            Confidence.LIKELY,
            step=step,
            group="optimizer state",
            evidence=({"what": "optimizers without the state that they had", "names": names[:16]},),
        )
    ]


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


def _gradients_are_others(pair: Redone) -> bool:
    """All gradients are larger, or all smaller, by half and by far more than their ratio varies from step to step."""
    before, after = pair.before["local_norm"], pair.after["local_norm"]
    known = (before > 0) & (after > 0) & np.isfinite(before) & np.isfinite(after)
    ratios = np.log(after[known] / before[known])
    if len(ratios) < LEAST_STEPS or not ((ratios > 0).all() or (ratios < 0).all()):
        return False
    mean, varies = abs(float(ratios.mean())), float(ratios.std(ddof=1)) / len(ratios) ** 0.5
    return mean > float(np.log(LEAST_RATIO)) and mean > DEVIATIONS * varies
