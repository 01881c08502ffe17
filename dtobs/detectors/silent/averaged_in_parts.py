"""gradients-not-synchronized: copies of one model whose gradients are averaged over a part of their ranks only.

What it does: looks at ranks that began with the same parameters and have gone apart since. In four cases they should
not have. They read inputs of their own and call each other in most steps, or a sampler deals their samples to all of
them, as in `own_models`. They pass each other activations in the forward and gradients of them in the backward of most
steps, on inputs of their own, as ranks do that hold a part of each sequence (context parallelism): then they train one
model, and its gradients have to be averaged over all of them. Or the rest of what they hold stays alike, and other
ranks began with other values for the same tensors, so these are copies of experts, and nobody averages them. Or they
exchange activations and began with other values for a part of their tensors only, as tensor-parallel ranks do on the
same samples and expert-parallel ones on their own: then the rest is whole on each, and has to stay alike. All are only
possible: layers that are cut by hand may begin alike as well, and models that teach each other may share a beginning.

Why it hurts: each set of ranks trains a model, or an expert, of its own on its share of the samples.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dtobs.detectors.peers import dealt_to, of_own_sequences, side_by_side
from dtobs.detectors.silent.config_mismatch import settings_of
from dtobs.detectors.silent.replica_divergence import FIRST_PERIOD
from dtobs.events import Kind, Phase, RankState
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import count, ranks_text

MOST_RANKS = 256
LOOKS = 64
"""The first looks at the digests, in which ranks part or do not."""
_SOON = 2
"""Looks after which all that was alike is apart: the last layer's gradient is right in the first step."""
LONG = 1024
"""Steps without a call, after which models are averaged by nobody: rounds of local training are shorter."""
ALONE = "copies:1:"
"""Under DDP whose process group is of one rank: `probes.layout.replica_key`."""
_EXCHANGES = ("all_to_all", "alltoall")
_NEXT = (
    "Add up or average the gradients of what is named over all of these ranks: in the layers that exchange activations,"
    " after the backward, or by wrapping it over the whole group."
)
MOST_STEPS = 0.9
"""The share of steps in which what is asked of every step has to be seen."""


def averaged_in_parts(view: RunView) -> list[Finding]:
    """One finding for each model that parted on ranks that began alike, and one for each part of a model."""
    if not 1 < len(view.ranks) <= MOST_RANKS:
        return []
    parted = list(_parted(view))
    found = [f for one in parted if (f := _one_model(view, one)) is not None]
    return [*found, *_tensors(parted), *_beside_shards(view)]


@dataclass(frozen=True)
class _Parted:
    """Ranks that began alike, in `parts` of which each stayed alike. Rows of their table: those `apart`, and the rest.

    `began` are the digests of all rows before the first step; `names` those of the table.
    """

    parts: list[list[int]]
    names: tuple[str, ...]
    apart: list[int]
    alike: list[int]
    began: tuple[int, ...]
    step: int

    @property
    def ranks(self) -> list[int]:
        return sorted(rank for part in self.parts for rank in part)


def _parted(view: RunView) -> Iterator[_Parted]:
    together: dict[object, list[int]] = defaultdict(list)
    for rank in view.ranks:
        meta, history = view.meta(rank), view.digests(rank)
        if len(history) < 2 or "digest" not in (history.dtype.names or ()) or meta.pipeline:
            continue
        # Different shards of one tensor are no copies, though they may begin alike.
        table = tuple((p.name, tuple(p.shape), p.replica.partition("/")[2]) for p in meta.params)
        if len(table) <= history["digest"].shape[1]:
            together[table, history["digest"][0].tobytes(), int(history["step"][0])].append(rank)
    for ranks in together.values():
        if len(ranks) > 1 and (parted := _parts(view, ranks)) is not None:
            yield parted


def _beside_shards(view: RunView) -> Iterator[Finding]:
    """Ranks that began with other values for a part of the model, and whose tensors that began alike went apart.

    They exchange activations: in the forward where they read the same samples, and gradients of them in the backward
    as well where each reads its own, or nobody knows what they read.
    """
    same: dict[object, list[int]] = defaultdict(list)
    every: dict[object, list[int]] = defaultdict(list)
    unknown: dict[object, list[int]] = defaultdict(list)
    for rank in view.ranks:
        meta, steps = view.meta(rank), view.rank_steps(rank)[1:FIRST_PERIOD]  # the first input may not be known
        if not meta.params or len(steps) < FIRST_PERIOD - 1 or meta.pipeline:
            continue
        # Tensor-parallel ranks have other copies of the same tensors: those of their own data-parallel group.
        of = tuple((p.name, tuple(p.shape), p.replica.split(":")[0], p.replica.partition("/")[2]) for p in meta.params)
        table = of, int(steps["step"][0])
        if steps["input_digest"].all():
            every[table].append(rank)
            same[table, steps["input_digest"].tobytes()].append(rank)
        elif not steps["input_digest"].any():
            unknown[table].append(rank)
    both = (Phase.FORWARD, Phase.BACKWARD)
    for tables, phases, words in ((same, (Phase.FORWARD,), _CUT), (every, both, _SPREAD), (unknown, both, _EITHER)):
        matters: dict[tuple[object, ...], list[_Parted]] = defaultdict(list)
        for ranks in tables.values():
            one = _whole_tensors(view, ranks, phases)
            if one is not None and (tables is not every or _own_inputs(view, one)):
                matters[one.names, tuple(one.apart), tuple(one.alike)].append(one)
        for alike in matters.values():
            yield _whole(alike, words)


def _whole_tensors(view: RunView, ranks: list[int], phases: tuple[Phase, ...]) -> _Parted | None:
    """What began alike on all of `ranks` and went apart at once, beside what began otherwise and what stays alike; None
    where that is not so.
    """
    looks = _looks(view, ranks) if len(ranks) > 1 else None
    if looks is None or not all(_exchanges(view, rank, set(ranks) - {rank}, phases) for rank in ranks):
        return None
    params = view.meta(ranks[0]).params
    common, digests = looks[0], looks[1][..., : len(params)]
    if digests.shape[2] < len(params):
        return None  # the table was written anew since
    moves: npt.NDArray[np.bool_] = (digests[:, 1:] != digests[:, :-1]).any(axis=(0, 1))
    whole: npt.NDArray[np.bool_] = moves & (digests[:, 0] == digests[0, 0]).all(axis=0)
    began_apart = moves & _all_differ(digests[:, :1])[0]
    went_apart: npt.NDArray[np.bool_] = whole & np.all(_all_differ(digests[:, _SOON:]), axis=0)
    alike: npt.NDArray[np.bool_] = whole & (digests == digests[:1]).all(axis=(0, 1))
    # What begins with a constant is alike on whatever ranks; a matrix is drawn.
    drawn = went_apart & np.array([len(p.shape) > 1 for p in params])
    if not (drawn.any() and began_apart.any() and (went_apart | alike)[whole].all()):
        return None
    return _Parted(
        [[rank] for rank in ranks],
        tuple(p.name for p in params),
        np.flatnonzero(went_apart).tolist(),
        np.flatnonzero(alike).tolist(),
        (),
        int(common[0]) + 1,
    )


_CUT = (
    "read the same samples, exchange activations in the forward",
    "as tensor-parallel ranks do",
    "the backward has to sum the gradient of what enters each layer that is cut by columns over the ranks, clipping"
    " needs the norm over all shards, and dropout has to draw alike on what is whole",
)
_SPREAD = (
    "read samples of their own, exchange activations and gradients of them in each step",
    "as expert-parallel ranks do",
    "the gradients of that have to be averaged over the ranks",
)
_EITHER = (
    "exchange activations and gradients of them in each step",
    "as tensor-parallel and expert-parallel ranks do",
    "the gradients of that have to be the same on all of the ranks: summed or averaged over them where each makes its"
    " own",
)
"""What such ranks do, who does so, and what the rest of the model then needs."""


def _whole(sets: list[_Parted], words: tuple[str, str, str]) -> Finding:
    first = sets[0]
    names = [first.names[row] for row in first.apart]
    more = f" and {count(len(names) - 1, 'other tensor')}" if len(names) > 1 else ""
    goes = f"began alike there and {'have' if more else 'has'} gone apart"
    rest = f", while {first.names[first.alike[0]]} and all else that began alike stays so" if first.alike else ""
    does, who, needs = words
    ranks = ", and ".join(ranks_text(one.ranks) for one in sets[:4])
    return _finding(
        sets,
        f"{ranks} {does} and began with other values for a part of the model, {who};"
        f" {names[0]}{more} {goes}{rest}. If each rank has the whole of {'these' if more else 'it'}, {needs}",
    )


def _parts(view: RunView, ranks: list[int]) -> _Parted | None:
    """How ranks that began alike parted; None where they did not, or did so for too short a time, or met again."""
    seen = _looks(view, ranks)
    if seen is None:
        return None
    common, looks = seen
    parts: dict[bytes, list[int]] = defaultdict(list)
    for place in range(len(ranks)):
        parts[looks[place].tobytes()].append(place)
    if len(parts) < 2:
        return None
    first = looks[[places[0] for places in parts.values()]]  # one rank of each part
    moves = (first[:, 1:] != first[:, :-1]).any(axis=(0, 1))
    moves[[row for row, p in enumerate(view.meta(ranks[0]).params[: len(moves)]) if p.counts]] = False
    differs = _all_differ(first[:, 1:])
    apart: npt.NDArray[np.intp] = np.flatnonzero(moves & differs.all(axis=0))
    alike: npt.NDArray[np.intp] = np.flatnonzero(moves & (first == first[:1]).all(axis=(0, 1)))
    if not len(apart) or len(apart) + len(alike) < moves.sum():
        return None  # some of it parted later, or met again: averaged now and then
    return _Parted(
        [[ranks[place] for place in places] for places in parts.values()],
        tuple(p.name for p in view.meta(ranks[0]).params),
        apart.tolist(),
        alike.tolist(),
        tuple(looks[0, 0].tolist()),
        int(common[0]) + 1,
    )


def _looks(view: RunView, ranks: list[int]) -> tuple[list[int], npt.NDArray[np.uint64]] | None:
    """The steps of the first looks that `ranks` have in common, and u64[ranks, looks, rows]."""
    histories = [view.digests(rank)[:LOOKS] for rank in ranks]
    if not all(len(h) > 1 and "digest" in (h.dtype.names or ()) for h in histories):
        return None
    common = sorted(set.intersection(*(set(h["step"].tolist()) for h in histories)))
    if len(common) < 2 or common[-1] - common[0] < FIRST_PERIOD:
        return None
    rows = [[h["step"].tolist().index(step) for step in common] for h in histories]
    return common, np.stack([h["digest"][at] for h, at in zip(histories, rows, strict=True)])


def _all_differ(looks: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """bool[looks, rows] of [ranks, looks, rows]: whether no two ranks have the same."""
    ordered = np.sort(looks, axis=0)
    different: npt.NDArray[np.bool_] = (ordered[1:] != ordered[:-1]).all(axis=0)
    return different


def _one_model(view: RunView, parted: _Parted) -> Finding | None:
    """The finding where everything parted, and the parts exchange what they compute and its gradients."""
    if _copies_of_all(view, parted):
        return None  # their gradients are averaged: what parts them is another matter, of `replica_divergence`
    settings = [settings_of(view, rank, 1 << 62) for rank in parted.ranks]
    if parted.alike or settings != settings[:1] * len(settings) or not _own_inputs(view, parted):
        return None
    sets = [part for part in parted.parts if len(part) > 1]
    where = f"averaged on {_listed(sets)} only" if sets else "not averaged"
    since = f"{count(len(parted.apart), 'tensor')} differ since step {parted.step}"
    if not all(_exchanges(view, rank, set(parted.ranks) - set(part)) for part in parted.parts for rank in part):
        ranks = set(parted.ranks)
        if not sets or not all(works_together(view, rank, ranks, everything=True) for rank in ranks):
            return None
        dealt = dealt_to(view, parted.ranks[0])
        why = f"a sampler deals their samples to {dealt} ranks" if dealt > len(sets) else "they call each other"
        return _finding(
            [parted], f"{ranks_text(ranks)} began alike and {why}, but the gradients of the model are {where}: {since}"
        )
    return _finding(
        [parted],
        f"{ranks_text(parted.ranks)} began alike and pass each other activations and gradients of them in each step,"
        f" but the gradients of the model are {where}: {since}. If each rank has a part of every sequence, gradients"
        " have to be averaged over all of them",
    )


def _copies_of_all(view: RunView, parted: _Parted) -> bool:
    """Whether all that parted is known to be one copy on all these ranks, as DDP over all of them says."""
    params = [view.meta(rank).params for rank in parted.ranks]
    keys = {tuple(held[row].replica for row in parted.apart) for held in params}
    return len(keys) == 1 and all(key.startswith("copies:") for key in keys.pop())


def _tensors(parted: list[_Parted]) -> Iterator[Finding]:
    """A finding for each part of the model that parted, on several sets of ranks that began differently, alone."""
    together: dict[tuple[object, ...], list[_Parted]] = defaultdict(list)
    for one in parted:
        if one.alike:
            together[one.names, tuple(one.apart)].append(one)
    for sets in together.values():
        began = [one.began for one in sets]
        unequal = {row for row, values in enumerate(zip(*began, strict=True)) if len(set(values)) > 1}
        first = sets[0]
        more = f" and {count(len(first.apart) - 1, 'other tensor')}" if len(first.apart) > 1 else ""
        what = f"the copies of {first.names[first.apart[0]]}{more}"
        goes = f"began alike and have gone apart since step {first.step}"
        if unequal == set(first.apart):
            alike = _listed([one.ranks for one in sets])
            text = (
                f"{what} {goes} on {alike}, while the rest of the model is kept alike: if they are the same experts,"
                " nobody averages their gradients"
            )
        elif unequal and not unequal & set(first.apart):
            ranks = ranks_text(sorted(rank for one in sets for rank in one.ranks))
            text = f"{what} on {ranks} {goes}: nothing averages their gradients, as is done for the rest of the model"
        else:
            continue
        yield _finding(sets, text)


def _listed(sets: list[list[int]]) -> str:
    """The sets of ranks one after the other, the first four."""
    return " and on ".join(ranks_text(ranks) for ranks in sets[:4]) + (", …" if len(sets) > 4 else "")


def _finding(sets: list[_Parted], text: str) -> Finding:
    first = sets[0]
    parts = [part for one in sets for part in one.parts]
    return Finding(
        "gradients-not-synchronized",
        text,
        tuple(rank for part in parts for rank in part),
        Confidence.POSSIBLE,
        step=first.step,
        aspect="averaged in parts",
        fault=False,
        next_step=_NEXT,
        evidence=({"what": "parameter digests", "parts": parts[:16], "tensors_that_differ": len(first.apart)},),
    )


def _own_inputs(view: RunView, parted: _Parted) -> bool:
    """Whether the parts go through inputs of their own: those of tensor-parallel ranks are the same.

    Parts of sequences are, although the whole ones are alike.
    """
    first = [part[0] for part in parted.parts]
    if len(of_own_sequences(view, first)) < len(first):
        return True
    _, inputs = side_by_side(view, first, "input_digest")
    ordered = np.sort(inputs, axis=0)
    own = (ordered[1:] != ordered[:-1]).all(axis=0) & (inputs != 0).all(axis=0)
    return bool(inputs.shape[1]) and float(own.mean()) >= MOST_STEPS


def _exchanges(
    view: RunView, rank: int, others: set[int], phases: tuple[Phase, ...] = (Phase.FORWARD, Phase.BACKWARD)
) -> bool:
    """Whether `rank` calls collectives with some of `others` in these phases of the steps, and sends nothing.

    What lies outside all phases and before the backward is of the forward of a model whose layers are called one by
    one; where no forward was seen, all that lies outside.
    """
    events, groups = view.events(rank), view.meta(rank).groups
    if (events["kind"] == Kind.P2P).any():
        return False
    calls = events[events["kind"] == Kind.COLLECTIVE]
    with_them = [number for number, group in groups.items() if others & set(group.ranks)]
    calls = calls[np.isin(calls["group"], with_them)]
    steps = np.unique(events["step"][events["kind"] == Kind.STEP_BEGIN])
    by_phase = {phase: calls["phase"] == phase for phase in phases}
    if Phase.FORWARD in by_phase:
        by_phase[Phase.FORWARD] |= (calls["phase"] == Phase.NONE) & _before_backward(events, calls)
    return bool(len(steps)) and all(
        np.isin(steps, calls["step"][chosen]).mean() >= MOST_STEPS for chosen in by_phase.values()
    )


def _before_backward(events: npt.NDArray[np.void], calls: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Which of `calls` come before the first backward of their step; all where `events` have no forward."""
    if not (events["phase"] == Phase.FORWARD).any():
        return np.ones(len(calls), bool)
    begins = events[(events["kind"] == Kind.PHASE_BEGIN) & (events["phase"] == Phase.BACKWARD)]
    steps, first = np.unique(begins["step"], return_index=True)
    place = np.searchsorted(steps, calls["step"])
    known = np.isin(calls["step"], steps)
    before: npt.NDArray[np.bool_] = np.zeros(len(calls), bool)
    before[known] = calls["t_ns"][known] < begins["t_ns"][first[place[known]]]
    return before


def works_together(view: RunView, rank: int, ranks: set[int], everything: bool) -> bool:
    """Whether nothing as large as a gradient is sent between `ranks`, and something says that they work together.

    That is: they call collectives in most steps. Or, once the training is over or long under way, a sampler deals the
    samples to them, or each is wrapped in DDP, or reduces its gradients over a group of itself. Where that is not
    `everything` a gradient would be part of a larger call; there, tokens must not be sent to experts, and messages may
    go to others: to the stage before or behind.
    """
    meta, steps, events = view.meta(rank), view.rank_steps(rank), view.events(rank)
    peers = set(events["value"][events["kind"] == Kind.P2P].astype(int).tolist())
    if not len(steps) or (peers if everything else peers & ranks):
        return False
    if not everything:
        return bool(np.median(steps["collectives"]) > 0) and not any(
            op.op.startswith(_EXCHANGES) for op in meta.ops.values()
        )
    calls = events[events["kind"] == Kind.COLLECTIVE]
    between = _bytes_by_step(calls, [number for number, group in meta.groups.items() if ranks <= set(group.ranks)])
    alone = _bytes_by_step(calls, [number for number, group in meta.groups.items() if len(group.ranks) == 1])
    wanted = sum(math.prod(p.shape) for p in meta.params)  # a fourth of it in FP32: it may be compressed
    half = 0.5 * len(np.unique(events["step"]))
    if max(between.values(), default=0) >= wanted:
        return False
    if len(between) > half:
        return True
    page = view.page(rank)
    if int(page["state"]) != RankState.CLOSED and int(page["steps_done"]) < LONG:
        return False
    reduces_alone = sum(size >= wanted for size in alone.values()) > half
    return dealt_to(view, rank) >= len(ranks) or reduces_alone or all(p.replica.startswith(ALONE) for p in meta.params)


def _bytes_by_step(calls: npt.NDArray[np.void], groups: list[int]) -> Counter[int]:
    """What the calls of each step in `groups` carry."""
    found: Counter[int] = Counter()
    for step, size in calls[np.isin(calls["group"], groups)][["step", "value"]].tolist():
        found[step] += size
    return found
