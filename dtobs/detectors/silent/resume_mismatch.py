"""resume-mismatch: a restart goes on with another learning rate, from other weights or without optimizer state.

What it does: compares the steps that a restart does again with the attempt before, where they read the same data: the
learning rate of each, the loss, which must lie within what the steps before it vary by, and the norm of the gradients,
whose ratio must be near 1 for what it varies by from step to step. A job that reads other data after its restart is
not judged; in one that counts its steps anew, the data tells which steps are the same. And an optimizer that kept
moments or a momentum before must not begin without them, or without those of some parameters, in the midst of the
data; nor with second moments of zero while it counts the steps that it has done. Where nothing tells which steps are
done again, the loss must not be back where it began while the optimizer has its state; and an optimizer must not be
without its state while the schedule of the learning rate goes on where it was, or the loss does. The optimizers of
ranks that share samples must have counted the same number of steps, or they have loaded different checkpoints.

Why it hurts: a scheduler that starts over warms up again; weights or optimizer state that were not loaded undo what
was learned; shards of different steps are a model that was never trained.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dtobs.detectors.peers import data_groups, outliers, tensor_groups
from dtobs.detectors.silent.audit import audits
from dtobs.detectors.silent.config_mismatch import COUNTED, KEPT_BY, common_step, settings_of, since
from dtobs.detectors.silent.restarts import LEAST_STEPS, Earlier, Redone, before, optimizer_states, redone
from dtobs.findings import Confidence, Finding
from dtobs.recording.meta import Meta
from dtobs.recording.view import RunView
from dtobs.words import count, ranks_do, ranks_text

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
    aligned = list(redone(view))
    pairs = [pair for pair in aligned if pair.same_inputs() and not pair.ahead]
    lost = _without_state(view, aligned)
    without = [*lost, *_moments_of_zero(view), *_of_other_steps(view, {rank for f in lost for rank in f.ranks})]
    found = []
    for name, called, words, is_odd in _QUANTITIES:
        weights = words.endswith(_NOT_LOADED)  # where it was seen, `weights_not_loaded` tells with the line
        if odd := [p for p in pairs if is_odd(p, name) and not (weights and view.meta(p.rank).unloaded)]:
            found.append(_redone_finding(name, called, words, odd))
            if weights:
                return [*found, *without]
    return [*found, *without, *_learned_again(view, {p.rank for p in pairs})]


def _of_other_steps(view: RunView, lost: Collection[int]) -> list[Finding]:
    """One finding for each group of ranks whose optimizers go on from different steps; `lost` go on from none."""
    found = []
    for group in data_groups(view) or tensor_groups(view):
        as_of = common_step(view, group) or 0
        states = {rank: settings_of(view, rank, as_of) for rank in group}
        if any(state.get("optimizer shares") for state in states.values()):
            continue  # what one of them trains may rest
        for name in sorted(name for name in states[group[0]] if name.endswith(COUNTED)):
            told = {rank: state.get(name, "") for rank, state in states.items()}
            ahead = {rank: int(said) for rank, said in told.items() if said.removeprefix("-").isdecimal()}
            known = len(ahead) == len(group)
            ahead = {rank: steps for rank, steps in ahead.items() if rank not in lost}
            if not known or len(set(ahead.values())) < 2:
                continue
            odd, majority = outliers(ahead)
            usual = max(value for rank, value in ahead.items() if not majority or rank not in odd)
            late = ", ".join(f"rank {rank} {_steps_apart(ahead[rank] - usual)}" for rank in odd if ahead[rank] != usual)
            step = since(view, [name], group, as_of)
            found.append(
                Finding(
                    "resume-mismatch",
                    f"the optimizers of {ranks_text(group)} go on from different steps since step {step}: {late} than"
                    f" {'the others' if majority else ranks_text([r for r in odd if ahead[r] == usual])}, so they have"
                    " loaded different checkpoints",
                    tuple(odd),
                    Confidence.LIKELY,
                    step=step,
                    aspect="optimizer's steps",
                    expect="",
                    next_step="Load the same step on all ranks: let one rank choose it and tell the others.",
                    evidence=({"what": name, "values": {str(rank): n for rank, n in list(ahead.items())[:64]}},),
                )
            )
    return found


def _steps_apart(steps: int) -> str:
    return f"{count(abs(steps), 'step')} {'earlier' if steps < 0 else 'later'}"


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
        aspect=called,
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
    back: dict[int, _Losses] = {}
    for rank in view.ranks if view.attempt else ():
        earlier = before(view, rank)
        if rank in compared or earlier is None or view.meta(rank).unloaded:
            continue
        then, now = optimizer_states(earlier.meta), optimizer_states(view.meta(rank))
        if not any(then.get(name, [""])[0] == "empty" and states[0] == "kept" for name, states in now.items()):
            continue  # it begins anew, or nobody saw the beginning
        losses = _losses(view, rank, earlier)
        if losses is not None and losses.begun >= losses.last + BACK * (losses.first - losses.last):
            back[rank] = losses
    if not back:
        return []
    losses = next(iter(back.values()))
    return [
        Finding(
            "resume-mismatch",
            f"{ranks_do(back, 'have')} gone on after a restart with the optimizer's state and a loss of"
            f" {losses.begun:.4g}, as at the beginning of the attempt before ({losses.first:.4g}), which had come to"
            f" {losses.last:.4g}: {_NOT_LOADED}",
            tuple(back),
            Confidence.LIKELY,
            step=int(view.rank_steps(min(back))["step"][0]),
            aspect="loss",
            evidence=(
                {
                    "what": "median loss",
                    "beginning": losses.first,
                    "end": losses.last,
                    "after the restart": losses.begun,
                },
            ),
        )
    ]


@dataclass(frozen=True)
class _Losses:
    """Medians: of the first and the last losses of the attempt before, and of the first ones of this attempt."""

    first: float
    last: float
    begun: float


def _losses(view: RunView, rank: int, earlier: Earlier) -> _Losses | None:
    """None where they do not tell the beginning of the attempt before from its end."""
    past, again = (steps["loss"][np.isfinite(steps["loss"])] for steps in (earlier.steps, view.rank_steps(rank)))
    if int(earlier.steps["stamp"][0]) != 1 or len(past) < 3 * EDGE or len(again) < EDGE:
        return None
    first, last, begun = (float(np.median(part)) for part in (past[:EDGE], past[-2 * EDGE :], again[:EDGE]))
    if past[:EDGE].min() <= past[-2 * EDGE :].max() or first - last <= FALL * abs(first):
        return None
    return _Losses(first, last, begun)


def _goes_on(view: RunView, rank: int, earlier: Earlier) -> str:
    """What tells that `rank` has loaded what the attempt before had learnt, where no step is known to be done again."""
    rates, begun = earlier.steps["learning_rate"], view.rank_steps(rank)["learning_rate"][:EDGE]
    if len(rates) >= 3 * EDGE and np.isfinite(rates).all() and int(earlier.steps["stamp"][0]) == 1:
        change = float(np.abs(np.diff(rates[-2 * EDGE :])).max())
        for rate in begun[np.abs(begun - rates[-1]) <= EDGE * change].tolist():
            if np.abs(rates[:EDGE] - rate).min() > EDGE * change > 0:
                return f"the schedule of the learning rate goes on ({rate:.4g})"
    losses = _losses(view, rank, earlier)
    if losses is None or losses.begun > losses.last + (1 - BACK) * (losses.first - losses.last):
        return ""
    return f"the loss goes on where it was ({losses.begun:.4g})"


def _without_state(view: RunView, aligned: Sequence[Redone]) -> list[Finding]:
    """One finding for the ranks whose optimizers went on in the midst of the data without what they had kept."""
    lost: dict[int, list[str]] = {}
    step, why = 0, ""
    pairs = {pair.rank: pair for pair in aligned}
    for rank in view.ranks if view.attempt else ():
        earlier, steps, pair = before(view, rank), view.rank_steps(rank), pairs.get(rank)
        if earlier is None or not len(steps):
            continue
        told = "" if pair is not None else _goes_on(view, rank, earlier)
        if not told and (pair is None or not len(pair.begun) or (pair.numbered and int(steps["step"][0]) <= 1)):
            continue
        if names := _lost(earlier.meta, view.meta(rank)):
            lost[rank], step, why = names, int(steps["step"][0]), told
    if not lost:
        return []
    names = next(iter(lost.values()))
    return [
        Finding(
            "resume-mismatch",
            f"{ranks_do(lost, 'have')} gone on at step {step} after a restart without the state, such as the moments of"
            f" Adam, of {' and '.join(f'the {name}' for name in names[:4])}{', while ' * bool(why)}{why}",
            tuple(lost),
            Confidence.POSSIBLE if "loss" in why else Confidence.LIKELY,
            step=step,
            aspect="optimizer state",
            fault="loss" not in why,
            evidence=({"what": "optimizers without the state that they had", "names": names[:16]},),
        )
    ]


def _lost(then: Meta, now: Meta) -> list[str]:
    """The optimizers that had a state and began without it, or without a part of it."""
    states = optimizer_states(now)
    begun = {name: states[name][0] for name, was in optimizer_states(then).items() if "kept" in was and name in states}
    alike = _trained(then)[-1:] == _trained(now)[:1]  # what is trained only now begins anew, and rightly
    return [
        name.removesuffix(" state") + _only_a_part(state)
        for name, state in begun.items()
        if state == "empty" or (alike and state.startswith(KEPT_BY))
    ]


def _moments_of_zero(view: RunView) -> list[Finding]:
    """One finding for the ranks whose first step after a restart found second moments of zero, and a count of steps.

    What a window never had a gradient of has none either; so in all windows looked at later they must not be zero.
    """
    struck: dict[int, tuple[str, int, int]] = {}
    for audit in audits(view) if view.attempt else ():
        steps = view.rank_steps(audit.rank)
        if audit.kind != "adam" or not len(steps) or not any(s[:1] == ["kept"] for s in _states(view, audit.rank)):
            continue
        done = audit.records["done"]
        first: npt.NDArray[np.bool_] = audit.records["step"] == steps["step"][0]
        empty = (~audit.inside | (audit.before[:, 3] == 0)).all(axis=1)
        gradient = (audit.before[:, 1] != 0).sum(axis=1) > audit.inside.sum(axis=1) / 2
        zeroed, later = empty & gradient & first & (done >= EDGE), ~first
        if zeroed.any() and zeroed[first].all() and later.sum() >= EDGE and not empty[later].any():
            n = int(np.flatnonzero(zeroed)[0])
            struck[audit.rank] = audit.name(n), int(done[n]), int(audit.records["step"][n])
    if not struck:
        return []
    name, counted, step = next(iter(struck.values()))
    return [
        Finding(
            "resume-mismatch",
            f"the optimizer of {ranks_text(struck)} has gone on at step {step} after a restart with moments of zero"
            f" (seen in {name}) while it counts {counted} steps as done: it takes them for averages over these steps,"
            " so its first steps are too large",
            tuple(struck),
            Confidence.LIKELY,
            step=step,
            aspect="optimizer state",
            next_step="Load the moments with the step count, or begin the optimizer's state anew with neither.",
            evidence=({"what": "update audit", "parameter": name, "steps_done": counted},),
        )
    ]


def _states(view: RunView, rank: int) -> Iterable[list[str]]:
    return optimizer_states(view.meta(rank)).values()


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
