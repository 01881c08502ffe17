"""resume-mismatch: a restart goes on with another learning rate, from other weights or without optimizer state.

What it does: compares the steps that a restart does again with the attempt before, where they read the same data: the
learning rate of each, the loss, which must lie within what the steps before it vary by, and the norm of the gradients,
whose ratio must be near 1 for what it varies by from step to step. A job that reads other data after its restart is
not judged; in one that counts its steps anew, the data tells which steps are the same. And an optimizer that kept
moments or a momentum before must not begin without them, or without those of some parameters, in the midst of the
data. Where nothing tells which steps are done again, the loss must not be back where it began while the optimizer has
its state.

Why it hurts: a scheduler that starts over warms up again; weights or optimizer state that were not loaded undo what
was learned.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import numpy as np

from dtobs.detectors.silent.config_mismatch import KEPT_BY
from dtobs.detectors.silent.restarts import LEAST_STEPS, Redone, before, optimizer_states, redone
from dtobs.findings import Confidence, Finding
from dtobs.recording.meta import Meta
from dtobs.recording.view import RunView
from dtobs.words import ranks_do, ranks_text

RELATIVE = 1e-6
DEVIATIONS = 6.0
LEAST_RATIO = 1.5
EDGE = 4
"""Losses at the beginning of an attempt that are compared, and twice as many at its end."""
FALL, BACK = 0.2, 0.75
"""The share by which the loss must have fallen, and how much of that it must have risen again."""
_NOT_LOADED = "its weights were probably not loaded"


def resume_mismatch(view: RunView) -> list[Finding]:
    """One finding for each quantity that differs, with all its ranks."""
    pairs = [pair for pair in redone(view) if pair.same_inputs()]
    found = []
    for name, called, words, is_odd in _QUANTITIES:
        if odd := [pair for pair in pairs if is_odd(pair, name)]:
            found.append(_redone_finding(name, called, words, odd))
            if words.endswith(_NOT_LOADED):
                return [*found, *_without_state(view)]
    return [*found, *_without_state(view), *_learned_again(view, {p.rank for p in pairs})]


def _redone_finding(name: str, called: str, words: str, odd: Sequence[Redone]) -> Finding:
    """That the pairs of `odd` differ in the field `name`: `words` take its value after and before."""
    pair, ranks = odd[0], tuple(p.rank for p in odd)
    known = np.isfinite(pair.before[name]) & np.isfinite(pair.after[name])
    then, now = pair.before[known], pair.after[known]
    step = int(now["step"][0])
    since = "" if pair.numbered else " since the restart"
    return Finding(
        "resume-mismatch",
        f"step {step}{since}, done again after a restart, has {words.format(now[name][0], then[name][0])} (on"
        f" {ranks_text(ranks)})",
        ranks,
        Confidence.LIKELY,
        step=step,
        group=called,
        fault=words.endswith(_NOT_LOADED),
        evidence=(
            {
                "what": f"{name} of steps done again",
                "before": then[name][:16].tolist(),
                "after": now[name][:16].tolist(),
            },
        ),
    )


def _learned_again(view: RunView, compared: Collection[int]) -> list[Finding]:
    """One finding for the ranks whose loss is back at where it began, while their optimizers have what they kept.

    Only of ranks that are not in `compared`: nothing tells which of their steps are done again.
    """
    back: dict[int, tuple[float, float, float]] = {}
    for rank in view.ranks if view.attempt else ():
        earlier = before(view, rank)
        if rank in compared or earlier is None:
            continue
        then, now = optimizer_states(earlier.meta), optimizer_states(view.meta(rank))
        if not any(then.get(name, [""])[0] == "empty" and states[0] == "kept" for name, states in now.items()):
            continue  # it begins anew, or nobody saw the beginning
        past, again = (steps["loss"][np.isfinite(steps["loss"])] for steps in (earlier.steps, view.rank_steps(rank)))
        if int(earlier.steps["stamp"][0]) != 1 or len(past) < 3 * EDGE or len(again) < EDGE:
            continue
        first, last, begun = (float(np.median(part)) for part in (past[:EDGE], past[-2 * EDGE :], again[:EDGE]))
        apart = min(past[:EDGE].min(), again[:EDGE].min()) > past[-2 * EDGE :].max()
        if apart and first - last > FALL * abs(first) and begun >= last + BACK * (first - last):
            back[rank] = first, last, begun
    if not back:
        return []
    first, last, begun = next(iter(back.values()))
    return [
        Finding(
            "resume-mismatch",
            f"{ranks_do(back, 'have')} gone on after a restart with the optimizer's state and a loss of {begun:.4g}, as"
            f" at the beginning of the attempt before ({first:.4g}), which had come to {last:.4g}: {_NOT_LOADED}",
            tuple(back),
            Confidence.LIKELY,
            step=int(view.rank_steps(min(back))["step"][0]),
            group="loss",
            evidence=({"what": "median loss", "beginning": first, "end": last, "after the restart": begun},),
        )
    ]


def _without_state(view: RunView) -> list[Finding]:
    """One finding for the ranks whose optimizers went on in the midst of the data without what they had kept."""
    lost: dict[int, list[str]] = {}
    step = 0
    for pair in redone(view):
        earlier = before(view, pair.rank)
        if earlier is None or (pair.numbered and int(pair.begun["step"][0]) <= 1) or not len(pair.begun):
            continue
        now_meta = view.meta(pair.rank)
        then, now = optimizer_states(earlier.meta), optimizer_states(now_meta)
        begun = {name: now[name][0] for name, states in then.items() if "kept" in states and now.get(name)}
        alike = (
            _trained(earlier.meta)[-1:] == _trained(now_meta)[:1]
        )  # what is trained only now begins anew, and rightly
        names = [
            name.removesuffix(" state") + _only_a_part(state)
            for name, state in begun.items()
            if state == "empty" or (alike and state.startswith(KEPT_BY))
        ]
        if names:
            lost[pair.rank] = names
            step = int(pair.begun["step"][0])
    if not lost:
        return []
    names = next(iter(lost.values()))
    return [
        Finding(
            "resume-mismatch",
            f"{ranks_do(lost, 'have')} gone on at step {step} after a restart without the state, such as the moments of"
            f" Adam, of {' and '.join(f'the {name}' for name in names[:4])}",
            tuple(lost),
            Confidence.LIKELY,
            step=step,
            group="optimizer state",
            evidence=({"what": "optimizers without the state that they had", "names": names[:16]},),
        )
    ]


def _trained(meta: Meta) -> list[str]:
    """Which parameters the model trained, whenever that had changed."""
    return [fields["trained parameters"] for _, fields in meta.settings if "trained parameters" in fields]


def _only_a_part(state: str) -> str:
    """ " for 5 of 8 parameters (a.weight and others)" where the others have kept theirs, else nothing."""
    found = re.match(rf"{KEPT_BY}(\d+) of (\d+) parameters, not by (.*)", state)
    if found is None:
        return ""
    without = int(found[2]) - int(found[1])
    return f" for {without} of its {found[2]} parameters ({found[3]}{' and others' if without > 1 else ''})"


def _differs(pair: Redone, name: str) -> bool:
    before, after = pair.before[name], pair.after[name]
    if not (np.isfinite(before).all() and np.isfinite(after).all()):
        return False
    largest = np.maximum(np.abs(before), np.abs(after))
    return bool((np.abs(before - after) > RELATIVE * largest).all())


def _loss_is_higher(pair: Redone, name: str) -> bool:
    """Every loss is above the one before by more than `DEVIATIONS` times what neighbouring steps differ by."""
    before, after = pair.before[name], pair.after[name]
    usual = pair.earlier[name][np.isfinite(pair.earlier[name])]
    if not (np.isfinite(before).all() and np.isfinite(after).all()) or len(usual) < 2 * len(before):
        return False
    noise = float(np.median(np.abs(np.diff(usual)))) + 1e-6 * float(np.abs(usual).max())
    return bool((after - before > DEVIATIONS * noise).all())


def _gradients_are_others(pair: Redone, name: str) -> bool:
    """All gradients are larger, or all smaller, by half and by far more than their ratio varies from step to step."""
    before, after = pair.before[name], pair.after[name]
    known = (before > 0) & (after > 0) & np.isfinite(before) & np.isfinite(after)
    ratios = np.log(after[known] / before[known])
    if len(ratios) < LEAST_STEPS or not ((ratios > 0).all() or (ratios < 0).all()):
        return False
    mean, varies = abs(float(ratios.mean())), float(ratios.std(ddof=1)) / len(ratios) ** 0.5
    return mean > float(np.log(LEAST_RATIO)) and mean > DEVIATIONS * varies


_QUANTITIES = (
    ("learning_rate", "learning rate", "learning rate {:.4g} where it had {:.4g}", _differs),
    ("loss_scale", "loss scale", "loss scale {:.4g} where it had {:.4g}: its scaler was not restored", _differs),
    ("loss", "loss", f"a loss of {{:.4g}} where it had {{:.4g}}: {_NOT_LOADED}", _loss_is_higher),
    (
        "local_norm",
        "gradient norm",
        f"a gradient norm of {{:.4g}} where it had {{:.4g}}: {_NOT_LOADED}",
        _gradients_are_others,
    ),
)
"""Fields of a step: what they are called, what is said of one that differs, and whether it does."""
