"""What is not looked at in a run, and why: comparisons between ranks that cannot be made, and what is not followed.

Every comparison between ranks rests on what the job says of its layout. Where the job says nothing, or says that each
rank is alone, nothing is found, and that must not look like "nothing is wrong". What has nothing to compare by its
nature, such as the copies of a fully sharded model or the peers of a single process, is left out. What ranks may do
apart on purpose (copies that are averaged now and then, batch norm of each rank) is told here too, and is no finding;
so are a model that trains on in evaluation mode after a validation, a validation in training mode and parameters that
nothing trains, which some do on purpose, and a NaN that the loop has skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dtobs.detectors.peers import data_groups
from dtobs.detectors.silent.averages_apart import buffers_never_alike
from dtobs.detectors.silent.config_mismatch import LAYERS, NORMS, UNGRADED, UNHELD, settings_of
from dtobs.detectors.silent.gradient_nonfinite import skipped_nan
from dtobs.detectors.silent.learned_copies import learned_keys
from dtobs.detectors.silent.own_models import parted_since
from dtobs.detectors.silent.replica_divergence import apart_on_purpose
from dtobs.detectors.silent.seed_policy import dropping_alike
from dtobs.expectations import is_declared
from dtobs.recording.laws import UPDATES
from dtobs.recording.stepless import FIRST_STEPS
from dtobs.recording.view import RunView
from dtobs.words import count, ranks_text, verb

MOST = 16
_EVALUATION_STEPS = 16
UNTRAINED_STEPS = 32
_UNTRAINED = {
    UNHELD: "gradients are computed for {} of {}, which no optimizer holds and nothing changes: give what is to be"
    " trained to the optimizer; for the rest, requires_grad_(False) saves its part of the backward",
    UNGRADED: "no gradient came to {} of {} in any step looked at, and nothing changes there, although the optimizer"
    " holds it: where it is to be trained, look for a branch that is not called, or for a detach()",
}
_UNKNOWN = "copies unknown"
_MOST_ASKED = 8
"""Ranks whose tensors are held against each other at each look: of thousands it would be much, and they are alike."""


@dataclass(frozen=True)
class Off:
    """`check` is what is not done, `reason` why, in a word or two; `text` says both, and how to change it."""

    check: str
    reason: str
    text: str


def comparisons_off(view: RunView) -> list[Off]:
    """Everything that is off, each once."""
    found = [
        *_unwatched(view),
        *_unrecorded(view),
        *_launched_as_many(view),
        *_unobserved(view),
        *_audit(view),
        *_failed(view),
        *_in_evaluation(view),
        *_validated_in_training_mode(view),
        *_never_called(view),
        *_untrained(view),
        *(Off("gradients", "a NaN was skipped", text) for text in [skipped_nan(view)] if text),
    ]
    if view.world_size > 1 and len(view.ranks) > 1:
        known = [rank for rank in view.ranks if view.meta(rank).layout]
        if not known:
            found += _no_model(view)
        elif not data_groups(view):
            found.append(_peers(view, known))
        found += _replicas(view, known)
        found += _apart(view)
        found += _drop_alike(view)
        found += _ledger(view)
        found += _batch_norm(view)
        if not any(off.reason == _UNKNOWN for off in found):  # where models may differ, their buffers say nothing
            found += _buffers(view)
    return list({(off.check, off.reason): off for off in found}.values())[:MOST]


def _unwatched(view: RunView) -> Iterator[Off]:
    for node in view.unwatched:
        yield Off(
            "monitor",
            "ended without a word",
            f"no monitor watches node {node} any more, it was killed: nobody is told of a hang, and no stacks are kept"
            f" of one; another one: dtobs monitor {view.root} --node {node}",
        )


def _launched_as_many(view: RunView) -> Iterator[Off]:
    for rank in view.ranks:
        many = view.meta(rank).process.get("launched_as")
        if isinstance(many, str) and many and view.world_size == 1:
            yield Off(
                "ranks",
                "a world of one",
                f"this process trains in a world of one, though it was started as one of several ({many}): either it"
                " made no process group, or the launcher's RANK and WORLD_SIZE did not reach it; each process then"
                " trains a model of its own, and nothing is compared between them",
            )


def _unobserved(view: RunView) -> Iterator[Off]:
    for rank in view.ranks:
        for each in view.meta(rank).unobserved:
            yield Off(
                "optimizer",
                "not followed",
                f"not followed: {each['what']} on {ranks_text([rank])}, since step {each['step']}; {each['why']}",
            )


def _audit(view: RunView) -> Iterator[Off]:
    """Of few optimizers is the arithmetic known."""
    for rank in view.ranks:
        kinds = view.meta(rank).laws.get(UPDATES.name, {}).get("kinds", {})
        unknown = [n for n, kind in kinds.items() if not kind and n.isdecimal()] if isinstance(kinds, dict) else []
        if unknown:
            settings = settings_of(view, rank, int(view.page(rank)["step"]))
            named = dict.fromkeys(settings.get(_optimizer(int(number)), "an optimizer") for number in unknown)
            yield Off(
                "updates",
                "arithmetic not known",
                f"the updates of {' and '.join(named)} are not computed again: that is done for AdamW, Adam and SGD of"
                " torch.optim, not for other classes or subclasses; whether anything but the optimizer writes its"
                " parameters is looked at all the same",
            )
            return


def _optimizer(number: int) -> str:
    """Its field in the settings that a rank recorded."""
    return f"optimizer {number + 1}" if number else "optimizer"


def _in_evaluation(view: RunView) -> Iterator[Off]:
    """Ranks whose model was put into evaluation mode, and that have trained on."""
    since: dict[int, int] = {}
    for rank in view.ranks:
        said = [(step, fields[LAYERS]) for step, fields in view.meta(rank).settings if LAYERS in fields]
        if len(said) < 2 or not _none(said[-1][1]) or _none(said[-2][1]):
            continue
        steps = view.recent_steps(rank, _EVALUATION_STEPS)
        trains = (steps["backward_ns"] > 0) & (steps["validation_ns"] > 0) & (steps["micro_batches"] == 0)
        # Settings are not looked at in every step: the oldest of these steps may be from before the change was seen.
        if len(steps) == _EVALUATION_STEPS and trains.all():
            since[rank] = min(said[-1][0], int(steps["step"][0]))
    if since:
        yield Off(
            "evaluation mode",
            "training goes on in it",
            f"the model of {ranks_text(since)} has been trained in evaluation mode since step {min(since.values())} or"
            " before, and was in training mode at first: dropout rests, and batch norm keeps its statistics; if that is"
            " not meant, call model.train() after each validation",
        )


def _validated_in_training_mode(view: RunView) -> Iterator[Off]:
    found: dict[int, tuple[int, int]] = {}
    for rank in view.ranks:
        match view.meta(rank).process.get("validated_in_training_mode"):
            case [int(step), int(layers)]:
                found[rank] = step, layers
    if found:
        step, layers = min(found.values())
        yield Off(
            "evaluation mode",
            "validation in training mode",
            f"passes without gradients on {ranks_text(found)}, first in step {step}, ran with"
            f" {count(layers, 'dropout or batch-norm layer')} in training mode: if they are a validation, its loss has"
            " the noise of dropout, and batch norm learns from its samples; call model.eval() before it, and"
            " model.train() after it",
        )


def _none(layers: str) -> bool:
    return layers.startswith("0 of ")


def _batch_norm(view: RunView) -> Iterator[Off]:
    """A fact, and often on purpose: each rank normalises by the samples that it has itself."""
    for ranks in data_groups(view):
        settings = settings_of(view, ranks[0], int(view.page(ranks[0])["step"]))
        layers, _, statistics = settings.get(NORMS, "").partition(", ")
        if len(ranks) > 1 and statistics.endswith("of each rank"):
            yield Off(
                "batch norm",
                "statistics of each rank",
                f"the batch norm of {ranks_text(ranks)} ({layers}) takes its statistics from the samples of each rank"
                " alone, so the same samples on another number of ranks train another model;"
                " torch.nn.SyncBatchNorm.convert_sync_batchnorm makes them those of all ranks",
            )


def _buffers(view: RunView) -> Iterator[Off]:
    """A fact: a codebook, a centre or a running mean that each rank makes of its own samples."""
    for ranks, names in buffers_never_alike(view):
        if all(is_declared("own-statistics", view.meta(rank).policy) for rank in ranks):
            continue
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield Off(
            "buffers",
            "of each rank",
            f"buffers of the model differ between {ranks_text(ranks)} after every forward looked at ({names[0]}{more}),"
            " though the parameters that are compared are alike: where each rank makes them of its own samples (a"
            " codebook, a centre), a checkpoint has those of one rank; all_reduce what they are made of to have them of"
            " all samples",
        )


def _never_called(view: RunView) -> Iterator[Off]:
    """Ranks that go backward in every step and whose model is never called itself; none where the first calls its own.

    It is the program that does so, and the steps of a thousand ranks are not read at each look to see one do.
    """
    ranks = []
    for rank in view.ranks:
        meta = view.meta(rank)
        if not meta.params or meta.pipeline:
            continue
        steps = view.recent_steps(rank, _EVALUATION_STEPS)
        alone = (steps["micro_batches"] == 0) & (steps["forward_ns"] + steps["validation_ns"] == 0)
        if len(steps) < _EVALUATION_STEPS or not (alone & (steps["backward_ns"] > 0)).all():
            break
        ranks.append(rank)
    if ranks:
        yield Off(
            "forward",
            "model never called",
            f"the model of {ranks_text(ranks)} is never called itself, but a method of it or its parts: the time of its"
            " forward is under other, and its inputs are not compared; give dtobs.attach the parts that the loop calls,"
            ' or use session.batch(…) and session.phase("forward")',
        )


def _untrained(view: RunView) -> Iterator[Off]:
    """Parameters that get gradients and are in no optimizer, and those in one that get none: they rest."""
    for setting, text in _UNTRAINED.items():
        found: dict[str, list[int]] = {}
        for rank in view.ranks:
            said = next((f[setting] for _, f in reversed(view.meta(rank).settings) if setting in f), "")
            if said and int(view.page(rank)["steps_done"]) >= UNTRAINED_STEPS and _rest(view, rank, said):
                found.setdefault(said, []).append(rank)
        if found:
            said, ranks = next(iter(found.items()))
            names = said.partition(" (")[2].removesuffix(")")
            yield Off("parameters", setting.removeprefix("parameters "), text.format(names, ranks_text(ranks)))


def _rest(view: RunView, rank: int, said: str) -> bool:
    """Whether the digests of all parameters that a setting names are the same in all steps."""
    names = set(said.partition(" (")[2].removesuffix(")").split(", ")) - {"…"}
    history, params = view.digests(rank), view.meta(rank).params
    rows = [row for row, p in enumerate(params) if p.name in names]
    if len(rows) < len(names) or len(history) < 2 or history["digest"].shape[1] <= max(rows, default=0):
        return False
    looks = history["digest"][:, rows]
    return bool((looks == looks[:1]).all())


def _unrecorded(view: RunView) -> Iterator[Off]:
    """Ranks that do not record though the others train."""
    if view.missing_ranks and int(view.pages["steps_done"].max(initial=0)) >= FIRST_STEPS:
        yield Off(
            "ranks",
            "not recorded",
            f"what {ranks_text(view.missing_ranks)} did is not recorded, nor whether the others wait for it:"
            " dtobs.attach() records a rank, also one without an optimizer",
        )


def _failed(view: RunView) -> Iterator[Off]:
    """Probes that gave up."""
    failed: dict[str, list[int]] = {}
    for rank in view.ranks:
        for name, said in view.meta(rank).probes.items():
            if said.get("state") == "failed":
                failed.setdefault(name, []).append(rank)
    for name, ranks in sorted(failed.items()):
        why = view.meta(ranks[0]).probes[name].get("reason")
        yield Off(name, "failed", f"the probe {name} failed on {ranks_text(ranks)} and was switched off: {why}")


def _no_model(view: RunView) -> Iterator[Off]:
    if any(int(view.page(rank)["steps_done"]) for rank in view.ranks):
        yield Off(
            "parameters",
            "no model",
            "parameters, gradients and inputs are not compared between ranks: no model is watched; give it to"
            " dtobs.attach(model, optimizer)",
        )


def _peers(view: RunView, known: list[int]) -> Off:
    """Why no ranks are known to do the same work on different samples."""
    layouts = {rank: view.meta(rank).layout for rank in known}
    what = "inputs, seeds, settings and gradient norms are not compared between ranks"
    if all(layout["data_ranks"] == [rank] for rank, layout in layouts.items()):
        if all(layout.get("kind") == "ddp" and not layout["coordinates"] for layout in layouts.values()):
            return Off(
                "data peers",
                "groups of one",
                f"{what}: each of {ranks_text(known)} is wrapped in DDP over a process group of one, so no gradient"
                " travels between them",
            )
        return Off("data peers", "one data rank", f"{what}: there is one data rank, so no rank reads other samples")
    if all(layout["data_ranks"] for layout in layouts.values()):
        return Off("data peers", "peers not recorded", f"{what}: of the ranks that read other samples one records")
    if any(layout["coordinates"] for layout in layouts.values()):
        names = ", ".join(next(iter(layouts.values()))["coordinates"])
        return Off(
            "data peers",
            "unknown dimension",
            f"{what}: the names of the mesh ({names}) do not say which dimension is for data; call them data, dp,"
            " replicate, tensor, …",
        )
    return Off(
        "data peers",
        "no mesh",
        f"{what}: nothing says which ranks read different samples; give attach(mesh=…) or declare the copies with"
        " attach(replicas=GROUP)",
    )


def _replicas(view: RunView, known: list[int]) -> Iterator[Off]:
    """Parameters of which nothing says whether other ranks have copies."""
    learned = learned_keys(view)
    dealt = {p.name for rank in known for p in view.meta(rank).params if 0 in p.shape}  # whole, but to single ranks
    unknown = {
        rank: [
            row
            for row, p in enumerate(view.meta(rank).params)
            if not p.replica and not p.counts and (rank, row) not in learned and p.name not in dealt
        ]
        for rank in known
    }
    if any(unknown.values()):
        rank = max(unknown, key=lambda r: len(unknown[r]))
        some = dict(list(unknown.items())[:_MOST_ASKED])
        of = f"{'all of ' if len(some) > 2 else ''}{ranks_text(list(some))}"
        parted, alike, step = parted_since(view, some)
        began = f"; {alike} began alike" if alike else ""
        differ = f"{len(parted)} of them {verb(len(parted), 'differ')} between {of} after step {step}"
        more = f" and {len(parted) - 2} more" if len(parted) > 2 else ""
        apart = f" ({differ}: {', '.join(parted[:2])}{more}{began})"
        yield Off(
            "copies of the model",
            _UNKNOWN,
            f"{len(unknown[rank])} of {len(view.meta(rank).params)} parameters are not compared between ranks: nothing"
            f" says which ranks hold copies of them{apart if parted else ''}; where some do, declare it with"
            " attach(replicas=GROUP)",
        )


def _apart(view: RunView) -> Iterator[Off]:
    for ranks, since in apart_on_purpose(view):
        if all(is_declared("own-models", view.meta(rank).policy) for rank in ranks):
            continue
        yield Off(
            "copies of the model",
            "averaged now and then",
            f"the copies of the model on {ranks_text(ranks)} differ {since} and no gradient travels between them:"
            " possibly they are averaged now and then on purpose (local SGD, DiLoCo), so nothing is made of it;"
            ' session.policy(average_every=STEPS) has their meetings checked, and session.policy(expect="own-models")'
            " or dtobs run --expect own-models says that they need not meet",
        )


def _drop_alike(view: RunView) -> Iterator[Off]:
    for ranks in dropping_alike(view):
        yield Off(
            "random numbers",
            "drawn alike",
            f"{ranks_text(ranks)} draw the same random numbers in every step, so they drop the same units on different"
            " data, which makes their mean gradient a little noisier; many trainers seed all ranks alike, so nothing"
            ' is made of it; session.policy(generators="differ") has it checked, and session.policy(expect="same-seed")'
            " or dtobs run --expect same-seed says that it is meant",
        )


def _ledger(view: RunView) -> Iterator[Off]:
    """What is said on one rank stands for those of which the like is said: ranks train different parameters."""
    off: dict[str, dict[int, str]] = {}
    for rank in view.ranks:
        said = view.meta(rank).probes.get("ledger")
        if said is not None and said.get("state") == "off":
            off.setdefault(str(said.get("short") or "group unknown"), {})[rank] = str(said.get("reason"))
    for short, reasons in off.items():
        first, reason = next(iter(reasons.items()))
        of_one = f"on {ranks_text([first])}, " if len(set(reasons.values())) > 1 else ""
        yield Off(
            "gradients",
            short,
            f"what becomes of each rank's gradient is not followed on {ranks_text(list(reasons))}: {of_one}{reason}",
        )
