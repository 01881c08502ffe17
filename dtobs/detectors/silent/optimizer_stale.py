"""optimizer-stale: gradients arrive, the optimizer steps, and no parameter changes.

What it does: looks at the digests of all parameters after each step of the optimizer. Where not one of them has changed
over `STEPS` steps, although each had a gradient that is finite and not zero and a learning rate above zero, the
optimizer holds other tensors than the model, or every update is lost to rounding. A model of which some part trains is
left alone: what is frozen is frozen, unless an optimizer holds what parameters of the model were before they were made
anew. A rank whose optimizer never steps, while those of ranks that do the same work do, is told as well, unless it is
sent what the others have made of the model. So is an optimizer that has never stepped although the gradients of
`probes.kept_gradients.UNUSED` batches were computed and zeroed again (of `UNUSED_BESIDE` where other optimizers step
meanwhile, or something else throws them away), one that steps in a loop without any backward, where parameters rest,
and one that no backward reaches any more. Of ranks that hold no copies, so that `replica_divergence` has nothing to
compare, and of a pipeline's stages, each that left out a single step is named.

Why it hurts: nothing is learnt, and the loss looks like that of a hard problem.
"""

from __future__ import annotations

import numpy as np

from dtobs.detectors.peers import data_groups, side_by_side
from dtobs.detectors.silent.config_mismatch import REPLACED, settings_of
from dtobs.detectors.silent.steps_left_out import NEXT_STEP, steps_at_rest, steps_left_out
from dtobs.events import Kind, Phase
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import ranks_text

STEPS = 6
"""Steps of the optimizer without any change."""
ALONE_STEPS = 16
"""Steps of the optimizer without any backward."""
PEERS_STEPS = 8
"""Steps of all its peers, while a rank does none."""
_SENT = frozenset({"broadcast", "scatter", "recv", "all_gather_coalesced"})


def optimizer_stale(view: RunView) -> list[Finding]:
    """One finding over all ranks whose parameters rest, and one of each set of ranks whose optimizer never steps."""
    never = [f for group in _peers(view) if (f := _never_stepped(view, group)) is not None]
    named = {rank for finding in never for rank in finding.ranks}
    left_out = [_left_out(view, group) for group in _peers(view) if _hold_no_copies(view, group)]
    left_out += [_left_out(view, group) for group in _pipelines(view)]
    return [
        *(_replaced(view) or _at_rest(view)),
        *never,
        *_unused(view, named),
        *_one_of_several(view),
        *_no_backward(view),
        *_starved(view),
        *filter(None, left_out),
    ]


def _replaced(view: RunView) -> list[Finding]:
    """Parameters that were made anew after the optimizer, which holds what they were before."""
    said = {rank: settings_of(view, rank, int(view.page(rank)["step"])).get(REPLACED, "") for rank in view.ranks}
    ranks = tuple(rank for rank, names in said.items() if names and int(view.page(rank)["steps_done"]) > STEPS)
    if not ranks:
        return []
    return [
        Finding(
            "optimizer-stale",
            f"the optimizer of {ranks_text(ranks)} holds tensors that the model no longer has, so that some parameters"
            f" get gradients and never change: {said[ranks[0]]}; they were made anew (a layer replaced,"
            " parallelize_module, fully_shard) after the optimizer was made",
            ranks,
            Confidence.CERTAIN,
            step=1,
            next_step="Make the optimizer after everything that replaces parameters of the model.",
            evidence=tuple({"what": REPLACED, "rank": rank, "parameters": said[rank]} for rank in ranks[:16]),
        )
    ]


def _unused(view: RunView, named: set[int]) -> list[Finding]:
    """Ranks, other than those `named` already, that throw away all gradients they make."""
    said = {rank: view.meta(rank).process.get("gradients_unused") for rank in view.ranks if rank not in named}
    unused = {rank: count for rank, count in said.items() if isinstance(count, int) and count > 0}
    if not unused:
        return []
    return [
        Finding(
            "optimizer-stale",
            f"the optimizer of {ranks_text(unused)} never steps: gradients were computed and zeroed"
            f" {min(unused.values())} times without a step, and no parameter has changed",
            tuple(unused),
            Confidence.LIKELY,
            step=1,
            evidence=tuple(
                {"what": "gradients thrown away", "rank": rank, "times": count}
                for rank, count in list(unused.items())[:16]
            ),
        )
    ]


def _one_of_several(view: RunView) -> list[Finding]:
    """An optimizer that never steps on any rank, while others of the loop do."""
    said = {rank: view.meta(rank).process.get("optimizer_unused") for rank in view.ranks}
    unused = {rank: told for rank, told in said.items() if isinstance(told, list) and len(told) == 3}
    if not unused:
        return []
    name, parameter, times = next(iter(unused.values()))
    return [
        Finding(
            "optimizer-stale",
            f"of several optimizers, the {name} of {parameter} never steps on {ranks_text(unused)}: its gradients were"
            f" computed and zeroed {times} times without a step, and its parameters have not changed",
            tuple(unused),
            Confidence.LIKELY,
            step=1,
            aspect="one of several",
            evidence=tuple(
                {"what": "gradients thrown away", "rank": rank, "optimizer": told[0], "parameter": told[1]}
                for rank, told in list(unused.items())[:16]
            ),
            next_step="Call the step of this optimizer, or leave its parameters out of the backward.",
        )
    ]


def _no_backward(view: RunView) -> list[Finding]:
    """Ranks that go forward and step, with no backward between, and whose parameters rest."""
    found = {rank: steps for rank in view.ranks if (steps := _steps_alone(view, rank))}
    if not found:
        return []
    return [
        Finding(
            "optimizer-stale",
            f"the optimizer of {ranks_text(found)} steps without any gradient: no backward was seen in"
            f" {min(found.values())} steps, and no parameter has changed",
            tuple(found),
            Confidence.LIKELY,
            step=1,
            evidence=tuple(
                {"what": "steps without a backward", "rank": rank, "steps": steps}
                for rank, steps in list(found.items())[:16]
            ),
        )
    ]


def _starved(view: RunView) -> list[Finding]:
    """Ranks whose optimizers step without any gradient, since some step, while backwards go on."""
    found: dict[int, tuple[int, str]] = {}
    for rank in view.ranks:
        match view.meta(rank).process.get("starved"):
            case [int(since), str(name)] if _rests_since(view, rank, since):
                found[rank] = since, name
    if not found:
        return []
    first = min(since for since, _ in found.values())
    name = next(iter(found.values()))[1]
    return [
        Finding(
            "optimizer-stale",
            f"the {name} of {ranks_text(found)} steps without any gradient since step {first}: backwards go on, and"
            " none reaches a parameter that it holds",
            tuple(found),
            Confidence.LIKELY,
            step=first,
            aspect="starved",
            next_step="Where the model was made anew, make its optimizer anew, or load what the new one is to hold into"
            " the model that the optimizer knows.",
            evidence=tuple(
                {"what": "steps without gradients", "rank": rank, "since": since, "optimizer": name}
                for rank, (since, name) in list(found.items())[:16]
            ),
        )
    ]


def _rests_since(view: RunView, rank: int, step: int) -> bool:
    """Whether no parameter of `rank` was seen to change after `step`."""
    digests = view.digests(rank)
    if not len(digests) or "digest" not in (digests.dtype.names or ()):
        return True
    later = digests["digest"][digests["step"] >= step]
    return not (later != later[:1]).any()


def _steps_alone(view: RunView, rank: int) -> int:
    """How many steps `rank` has done without a backward while its parameters rested; 0 where it is not so."""
    if int(view.page(rank)["steps_done"]) < ALONE_STEPS:
        return 0
    steps = view.rank_steps(rank)
    trains = (steps["micro_batches"] > 0) & (steps["learning_rate"] > 0) & (steps["backward_ns"] == 0)
    if len(steps) < ALONE_STEPS or not trains.all() or np.isfinite(steps["sample_norm"]).any():
        return 0
    digests = view.digests(rank)
    if not len(digests) or "digest" not in (digests.dtype.names or ()) or not digests["digest"].shape[1]:
        return 0
    rested = int(digests["step"][-1]) - int(digests["step"][0])
    if rested < ALONE_STEPS - 1 or (digests["digest"] != digests["digest"][:1]).any():
        return 0
    return len(steps) if _backwards(view, rank) == 0 else 0


def _peers(view: RunView) -> list[list[int]]:
    """Ranks whose optimizers step together: those of one pipeline stage of a mesh, otherwise those of the data."""
    stages: dict[int, list[int]] = {}
    for rank in view.ranks:
        layout = view.meta(rank).layout
        if layout.get("coordinates"):
            stages.setdefault(int(layout["stage"]), []).append(rank)
    return [ranks for ranks in stages.values() if len(ranks) > 1] or data_groups(view)


def _pipelines(view: RunView) -> list[list[int]]:
    """The ranks of each pipeline of torch's of which no rank has a peer that does the same work."""
    known = {rank: plan.get("ranks") for rank in view.ranks if (plan := view.meta(rank).pipeline)}
    peers = {rank for group in data_groups(view) for rank in group}
    groups = {tuple(ranks) for ranks in known.values() if isinstance(ranks, list) and not peers.intersection(ranks)}
    return [list(ranks) for ranks in sorted(groups) if len(ranks) > 1 and known.keys() >= set(ranks)]


def _never_stepped(view: RunView, group: list[int]) -> Finding | None:
    """Ranks that go through as many collectives as their peers, and never through a step of the optimizer."""
    pages = {rank: view.page(rank) for rank in group}
    idle = tuple(rank for rank in group if not int(pages[rank]["steps_done"]))
    others = [rank for rank in group if rank not in idle]
    if not idle or not others or min(int(pages[rank]["steps_done"]) for rank in others) < PEERS_STEPS:
        return None
    issued = min(int(pages[rank]["collectives"]) for rank in others)
    if any(2 * int(pages[rank]["collectives"]) < issued or issued < PEERS_STEPS for rank in idle):
        return None  # it is not there yet, or does something else
    steps = min(int(pages[rank]["steps_done"]) for rank in others)
    if any(_backwards(view, rank) < PEERS_STEPS or 2 * _sent(view, rank) > steps for rank in idle):
        return None
    return Finding(
        "optimizer-stale",
        f"the optimizer of {ranks_text(idle)} never steps, while that of {ranks_text(others)} has done {steps} steps",
        idle,
        Confidence.LIKELY,
        step=1,
        next_step="Call the optimizer's step on every rank, or send what the ranks that step have made of the model.",
        evidence=tuple(
            {"what": "steps", "rank": rank, "steps": int(page["steps_done"]), "collectives": int(page["collectives"])}
            for rank, page in list(pages.items())[:16]
        ),
    )


def _left_out(view: RunView, group: list[int]) -> Finding | None:
    """Ranks that left out a step of the optimizer, where nobody has a copy of what they hold."""
    left_out = steps_at_rest(view, group) | {
        rank: at for rank, at in steps_left_out(view, group).items() if _calls_of_two(view, group, rank, at)
    }
    if not left_out:
        return None
    step, others = min(left_out.values()), [rank for rank in group if rank not in left_out]
    return Finding(
        "optimizer-stale",
        f"{ranks_text(left_out)} left out an optimizer step in step {step}, which {ranks_text(others)} took: since then"
        " the parts of the model are not of one step",
        tuple(left_out),
        Confidence.LIKELY,
        step=step,
        aspect="left out",
        evidence=tuple(
            {"what": "an optimizer step left out", "rank": rank, "step": at} for rank, at in list(left_out.items())[:16]
        ),
        next_step=NEXT_STEP,
    )


def _calls_of_two(view: RunView, group: list[int], rank: int, step: int) -> bool:
    """Whether `rank` called as much in `step` as in two of its peers': it did not just go backward once more alone."""
    steps, calls = side_by_side(view, group, "collectives")
    most = calls[:, steps == step].max(axis=1)
    return bool(most[group.index(rank)] >= 1.5 * most.min() > 0)


def _hold_no_copies(view: RunView, group: list[int]) -> bool:
    """Whether each of these ranks is the only one that has what it holds."""
    return all(p.replica.split(":")[1:2] == ["1"] for rank in group for p in view.meta(rank).params)


def _backwards(view: RunView, rank: int) -> int:
    """How many backwards the rank has begun, of those that are still recorded."""
    events = view.events(rank)
    return int(((events["kind"] == Kind.PHASE_BEGIN) & (events["phase"] == Phase.BACKWARD)).sum())


def _sent(view: RunView, rank: int) -> int:
    """How often others may have sent this rank the model that they trained, as far as it is still recorded."""
    events, ops = view.events(rank), view.meta(rank).ops
    numbers = events["op"][(events["kind"] == Kind.COLLECTIVE) | (events["kind"] == Kind.P2P)]
    return sum(op in ops and ops[op].op in _SENT for op in numbers.tolist())


def _at_rest(view: RunView) -> list[Finding]:
    stale = {rank: steps for rank in view.ranks if (steps := _resting(view, rank))}
    if not stale:
        return []
    first = min(steps[0] for steps in stale.values())
    looks = min(len(steps) for steps in stale.values())
    return [
        Finding(
            "optimizer-stale",
            f"no parameter of {ranks_text(stale)} has changed since step {first}, over {looks} looked-at steps of the"
            " optimizer that had a gradient and a learning rate: it holds other tensors than the model, or its"
            " updates are lost to rounding",
            tuple(stale),
            Confidence.CERTAIN if len(stale) == len(view.ranks) else Confidence.LIKELY,
            step=first,
            evidence=tuple(
                {"what": "parameter digests", "rank": rank, "unchanged_after_steps": steps[:16]}
                for rank, steps in list(stale.items())[:16]
            ),
        )
    ]


def _resting(view: RunView, rank: int) -> list[int]:
    """The steps after which all parameters of `rank` still were what they were at the oldest look; [] if any moved."""
    digests, steps = view.digests(rank), view.rank_steps(rank)
    if len(digests) <= STEPS or "digest" not in (digests.dtype.names or ()) or not digests["digest"].shape[1]:
        return []
    if (digests["digest"] != digests["digest"][:1]).any():
        return []
    with np.errstate(invalid="ignore"):
        norm = np.where(np.isfinite(steps["local_norm"]), steps["local_norm"], steps["sample_norm"])
        alive = (norm > 0) & np.isfinite(norm) & (steps["learning_rate"] > 0) & (steps["nonfinite"] == 0)
    moved = np.intersect1d(steps["step"][alive], digests["step"])
    return [int(step) for step in moved] if len(moved) >= STEPS else []
