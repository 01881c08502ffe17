"""seed-policy: random numbers that must be equal between ranks differ, or the other way round.

What it does: five comparisons.
 * Copies of the model that began with different parameters, seen in the digests from before the first optimizer step.
 * Shards of a matrix that began with equal values on all ranks, unlike those of other matrices of that shape: each rank
   drew its shard from the same random numbers (a sharded model that is initialised on the host does).
 * Shards of vectors, such as norm weights and biases, that began on the first rank with values that each layer has for
   itself, and on all others with a constant that is the same in every layer: the first alone loaded a checkpoint.
 * What the job declared by ``session.policy(equal={"seed": 1}, differ={"dropout seed": 7})``: values that must be
   equal on all ranks, and values that must differ between ranks that read different data.
 * ``session.policy(generators="differ")`` or ``"equal"``: the states of torch's generators between ranks that read
   different data, at the end of the same steps.

Without a declaration nobody can tell a mistake from what transformers' Trainer, Accelerate and Lightning do in every
healthy job, which is to seed all ranks alike: that ranks then drop the same units on different data is said as a fact
by `detectors.comparisons`, and is no finding.

Why it hurts: a different seed gives a rank another model or another order of the data; equal dropout makes the
data-parallel gradient noisier than it need be; equal shards make a matrix repeat itself, so it can learn less.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dtobs.detectors.peers import data_groups, outliers, rows_of
from dtobs.detectors.silent.replica_divergence import going_their_own_ways
from dtobs.detectors.silent.replicas import ReplicaSet, from_the_beginning, replica_sets
from dtobs.findings import Confidence, Finding
from dtobs.recording.meta import Parameter
from dtobs.recording.step_window import StepWindow
from dtobs.recording.view import RunView
from dtobs.words import count, ranks_text

WINDOW = 64
LEAST_STEPS = 3
REST = 8
MOST_SHARDS = 64
"""Ranks whose shards are compared."""
LEAST_VECTORS = 4
"""Vectors, of two or more kinds, whose shards some ranks must have loaded."""
_DROPPING = "drop alike"
"""In the memo of a view: the step of the last look at random numbers that nothing was declared of, and what it gave."""
_MATRICES = (2, 4, 5)
"""Dimensions of a matrix or convolution; a stack of experts has three, and may begin as copies of one on purpose."""


def seed_policy(view: RunView) -> list[Finding]:
    """One finding for each rule that is broken (for each group of ranks)."""
    return [*_initial(view), *_shards(view), *_not_loaded(view), *_declared(view), *_generators(view)]


def _initial(view: RunView) -> list[Finding]:
    found = []
    for copies in replica_sets(view):
        if copies.learned or not from_the_beginning(view, copies) or not copies.differs[0].any() or copies.ahead():
            continue
        which = int(copies.differs[0].argmax())
        values = {r: int(d) for r, d in zip(copies.ranks, copies.digests[:, 0, which], strict=True)}
        odd, majority = outliers(values)
        than = "than the others " if majority else ""
        apart = going_their_own_ways(view, copies)
        why, next_step = _why(view, copies)
        found.append(
            Finding(
                "seed-policy",
                f"{ranks_text(odd)} began with other parameters {than}(first {copies.names[which]}){why}",
                tuple(odd),
                Confidence.CERTAIN,
                step=int(copies.steps[0]) + 1,
                aspect="initial parameters",
                next_step=next_step,
                expect="own-models",
                fault=not apart,
                evidence=(
                    {
                        "what": "parameter digests before the first optimizer step",
                        "parameter": copies.names[which],
                        "parameters_that_differ": int(copies.differs[0].sum()),
                        "digests": {str(r): f"{v:016x}" for r, v in list(values.items())[:16]},
                    },
                ),
                since_ns=int(copies.times_ns[:, 0].max()),
            )
        )
    return found


def _why(view: RunView, copies: ReplicaSet) -> tuple[str, str]:
    """How copies came to begin otherwise, and what to do; "" for what the code says. Where others that were drawn are
    equal, they may be meant to.
    """
    shapes = {p.name: p.shape for p in view.meta(copies.ranks[0]).params}
    equal = [name for name, differs in zip(copies.names, copies.differs[0], strict=True) if not differs]
    drawn = next((name for name in equal if len(shapes.get(name, ())) > 1), "")
    if not drawn:
        return ": the model was initialised with different seeds and nothing copied it to the others", ""
    return (
        f", while {drawn} began alike: either nothing copied them to the others, or each rank has experts or shards of"
        " its own there, whose gradients are averaged over ranks that hold others",
        "Average gradients over the ranks that hold the same tensor only, or seed its initialisation alike on them.",
    )


def _shards_that_began(view: RunView) -> Iterator[tuple[int, Parameter, str, str, int]]:
    """The rank, the parameter, its mesh, which shard, and its digest from before the first optimizer step."""
    for rank in view.ranks[:MOST_SHARDS]:
        table, history, steps = view.meta(rank).params, view.digests(rank), view.rank_steps(rank)
        if not len(history) or not len(steps) or int(history["step"][0]) != int(steps["step"].min()) - 1:
            continue
        for parameter, digest in zip(table, history["digest"][0].tolist(), strict=False):
            mesh, _, part = parameter.replica.partition("/")
            if part:
                yield rank, parameter, mesh, part, digest


def _shards(view: RunView) -> list[Finding]:
    """A finding where the shards of two or more matrices began alike though each matrix has values of its own."""
    began: dict[str, dict[str, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))  # mesh, matrix, rank: digest
    shapes: dict[str, tuple[int, ...]] = {}
    parts: dict[tuple[str, str], set[str]] = defaultdict(set)  # mesh and matrix: which shards there are
    for rank, parameter, mesh, part, digest in _shards_that_began(view):
        if len(parameter.shape) in _MATRICES:
            shapes[parameter.name] = parameter.shape
            parts[mesh, parameter.name].add(part)
            began[mesh][parameter.name][rank] = digest
    found = []
    for mesh, matrices in began.items():
        alike = {name: of for name, of in matrices.items() if len(parts[mesh, name]) > 1 and len(set(of.values())) == 1}
        drawn: dict[tuple[int, ...], dict[str, int]] = defaultdict(dict)
        for name, of in alike.items():
            drawn[shapes[name]][name] = next(iter(of.values()))
        names: list[str] = []
        for values in drawn.values():  # what is filled with a constant is alike in all matrices of a shape
            often = Counter(values.values())
            own = [name for name, value in values.items() if often[value] == 1]
            names += own if len(own) > 1 else []
        if names:
            ranks = tuple(sorted(alike[names[0]]))
            found.append(
                Finding(
                    "seed-policy",
                    f"{ranks_text(ranks)} began with equal values in different shards of {names[0]} and"
                    f" {count(len(names) - 1, 'other matrix', 'other matrices')}: each drew its own from the same"
                    " random numbers, so that the whole repeats itself",
                    ranks,
                    Confidence.LIKELY,
                    step=int(view.digests(ranks[0])["step"][0]) + 1,
                    aspect="initial shards",
                    expect="same-seed",
                    fault=False,
                    evidence=({"what": "digests of shards before the first optimizer step", "matrices": names[:16]},),
                    next_step="Initialise the model before it is sharded, or seed each rank of the mesh differently"
                    " while its shards are filled.",
                )
            )
    return found


def _not_loaded(view: RunView) -> list[Finding]:
    """A finding for each mesh of which all ranks but the first began with constants where that began with a checkpoint.

    Vectors are of one kind where their names are equal but for numbers: those of a model's layers. Of any other rank a
    shard may be constant while the rest is not: the one that holds the forget gates of an LSTM's biases.
    """
    began: dict[str, dict[str, dict[int, list[int]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    names: dict[str, str] = {}  # by kind the first of its vectors
    least = len(view.ranks[:MOST_SHARDS]) ** 2  # elements of which no shard is empty
    for rank, parameter, mesh, _, digest in _shards_that_began(view):
        if len(parameter.shape) == 1 and parameter.shape[0] >= least:
            kind = f"{_without_numbers(parameter.name)} of {parameter.shape[0]}"
            began[mesh][kind][rank].append(digest)
            names.setdefault(kind, parameter.name)
    found = []
    for kinds in began.values():
        members = sorted({rank for by_rank in kinds.values() for rank in by_rank})
        parted = [kind for kind, by_rank in kinds.items() if _only_the_first_varies(members, by_rank)]
        vectors = sum(len(kinds[kind][members[0]]) for kind in parted)
        if len(parted) < 2 or vectors < LEAST_VECTORS:
            continue
        ranks = tuple(members[1:])
        found.append(
            Finding(
                "seed-policy",
                f"{ranks_text(ranks)} began with constants in the shards of {count(vectors, 'vector')}"
                f" ({names[parted[0]]}, …), where rank {members[0]} began with other values in each"
                " layer: a checkpoint was loaded on that rank only, before the model was sharded, and sharding sends"
                " nothing",
                ranks,
                Confidence.LIKELY,
                step=int(view.digests(ranks[0])["step"][0]) + 1,
                aspect="shards not loaded",
                expect="own-models",
                evidence=({"what": "digests of shards before the first optimizer step", "kinds": sorted(parted)[:16]},),
                next_step="Load the checkpoint on every rank before fully_shard, or after it with"
                " set_model_state_dict and StateDictOptions(full_state_dict=True, broadcast_from_rank0=True).",
            )
        )
    return found


@lru_cache(4096)
def _without_numbers(name: str) -> str:
    return re.sub(r"[0-9]+", "#", name)


def _only_the_first_varies(members: list[int], by_rank: Mapping[int, list[int]]) -> bool:
    """Whether the digests of all layers are different on the first of `members`, and the same on each of the others."""
    if len(members) < 2 or by_rank.keys() != set(members) or len(by_rank[members[0]]) < 2:
        return False
    different = [len(set(by_rank[rank])) for rank in members]
    return different[0] == len(by_rank[members[0]]) and set(different[1:]) == {1}


def _declared(view: RunView) -> list[Finding]:
    found = []
    for name, values in _values(view, "equal").items():
        if len(set(values.values())) > 1:
            odd, majority = outliers(values)
            others = sorted(set(values) - set(odd))
            against = f", the others {values[others[0]]}" if majority else ""
            said = ", ".join(f"rank {r} {values[r]}" for r in odd[:8])
            found.append(_broken(odd, f"{name} must be equal on all ranks: {said}{against}", name, values))
    for name, values in _values(view, "differ").items():
        for group in data_groups(view):
            same: dict[str, list[int]] = {}
            for rank in group:
                if rank in values:
                    same.setdefault(values[rank], []).append(rank)
            for value, ranks in same.items():
                if len(ranks) > 1:
                    text = (
                        f"{name} must differ between ranks that read different data: {ranks_text(ranks)} have {value}"
                    )
                    found.append(_broken(ranks, text, name, values))
    return found


def _values(view: RunView, rule: str) -> dict[str, dict[int, str]]:
    """name → rank → declared value (as JSON text)."""
    found: dict[str, dict[int, str]] = {}
    for rank in view.ranks:
        declared = view.meta(rank).policy.get(rule)
        if isinstance(declared, dict):
            for name, value in declared.items():
                found.setdefault(str(name), {})[rank] = json.dumps(value, sort_keys=True)
    return found


def _broken(ranks: list[int], summary: str, name: str, values: Mapping[int, str]) -> Finding:
    shown = {str(r): values[r] for r in sorted(values)[:16]}
    return Finding(
        "seed-policy",
        summary,
        tuple(ranks),
        Confidence.CERTAIN,
        aspect=name,
        expect="",
        evidence=({"what": "declared values", "name": name, "values": shown},),
    )


def _generators(view: RunView) -> list[Finding]:
    found = []
    window = view.steps(WINDOW)
    for group in data_groups(view):
        rule = {view.meta(r).policy.get("generators") for r in group}
        states = _states(window, rows_of(view, group))
        if rule == {"equal"}:
            found += _must_be_equal(window, group, states)
        elif rule == {"differ"}:
            found += [_must_differ(window, ranks, known) for ranks, known in _alike(group, states)]
    return found


def dropping_alike(view: RunView) -> list[list[int]]:
    """Ranks that drop the same units on different data, in every step, where nothing was declared of that.

    Asked at every look of a screen: the steps are read again only when `REST` more have been taken.
    """
    groups = [
        group
        for group in data_groups(view)
        if {view.meta(r).policy.get("generators") for r in group} == {None} and _drops_units(view, group)
    ]
    if not groups:
        return []
    step = int(view.pages["step"].max())
    known: tuple[int, list[list[int]]] | None = view.memo.get(_DROPPING)
    if known is None or not known[0] <= step < known[0] + REST:
        window = view.steps(WINDOW)
        found: list[list[int]] = []
        for group in groups:
            states = _states(window, rows_of(view, group))
            if _moves(states):
                found += [ranks for ranks, _ in _alike(group, states)]
        known = view.memo[_DROPPING] = (step, found)
    return known[1]


def _states(window: StepWindow, rows: list[int]) -> npt.NDArray[np.uint64]:
    """u64[ranks, steps]: torch's generators, host and device, as one number; 0 where not known."""
    records = window.records[rows]
    both: npt.NDArray[np.uint64] = records["rng_torch"] * np.uint64(0x9E3779B97F4A7C15) + records["rng_device"]
    both[(records["rng_torch"] == 0) | ~window.valid[rows]] = 0
    return both


def _drops_units(view: RunView, group: list[int]) -> bool:
    return all(int(view.meta(r).layout.get("dropout", 0) or 0) > 0 for r in group)


def _moves(states: npt.NDArray[np.uint64]) -> bool:
    """Whether every rank draws numbers in every step it recorded."""
    for row in states:
        known = row[row != 0]
        if len(known) <= LEAST_STEPS or (known[1:] == known[:-1]).any():
            return False
    return True


def _must_be_equal(window: StepWindow, group: list[int], states: npt.NDArray[np.uint64]) -> list[Finding]:
    known = (states != 0).all(axis=0)
    unequal = known & (states != states[:1]).any(axis=0)
    if unequal.sum() < LEAST_STEPS:
        return []
    last = int(np.flatnonzero(unequal)[-1])
    odd, majority = outliers({r: int(s) for r, s in zip(group, states[:, last], strict=True)})
    first = int(window.steps[int(unequal.argmax())])
    whom = "from the other ranks'" if majority else "from each other's"
    return [
        Finding(
            "seed-policy",
            f"the generators of {ranks_text(odd)} differ {whom} since step {first}; they were declared equal",
            tuple(odd),
            Confidence.CERTAIN,
            step=first,
            aspect="generators",
            expect="",
            evidence=({"what": "generator digests", "steps_unequal": int(unequal.sum()), "steps": int(known.sum())},),
        )
    ]


def _alike(group: list[int], states: npt.NDArray[np.uint64]) -> list[tuple[list[int], npt.NDArray[np.bool_]]]:
    """Ranks whose generators were equal at the end of every step in which all are known, and those steps, bool[N]."""
    known: npt.NDArray[np.bool_] = (states != 0).all(axis=0)
    if known.sum() < LEAST_STEPS:
        return []
    same: dict[bytes, list[int]] = {}
    for rank, row in zip(group, states[:, known], strict=True):
        same.setdefault(row.tobytes(), []).append(rank)
    return [(ranks, known) for ranks in same.values() if len(ranks) > 1]


def _must_differ(window: StepWindow, ranks: list[int], known: npt.NDArray[np.bool_]) -> Finding:
    return Finding(
        "seed-policy",
        f"{ranks_text(ranks)} draw the same random numbers in every step; they were declared different",
        tuple(ranks),
        Confidence.CERTAIN,
        step=int(window.steps[known][0]),
        aspect="generators",
        fault=True,
        evidence=({"what": "generator digests", "steps_equal": int(known.sum()), "declared": True},),
    )
