"""data-mismatch: tensor-parallel or context-parallel ranks of one replica read different data.

What it does: compares the digests of the inputs of each step between ranks that differ in their place along tensor
dimensions of the mesh only, or whose copies of a model were alike (`learned_copies`) until they went apart. Their
layers are parts of one model, so they must be given one batch, unless they split each sequence between them before the
model sees it. So there must be a reason to know better: the plan of tensor parallelism takes tokens to be the same, the
inputs were equal before, the ranks read each other's samples in other steps, or a DistributedSampler deals to more
ranks than there are replicas of the model. Ranks among
which sequences are split have different inputs: of them the sampler is asked, unless they hand each other samples first
(Ulysses' loaders do), and the whole sequences that torch's ``context_parallel`` was given are compared.

Why it hurts: each computes its part of every product for another sample; the sums mean nothing, and nothing raises.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dtobs.detectors.peers import (
    data_groups,
    dealt_to,
    outliers,
    rows_of,
    sequence_groups,
    sequence_mesh,
    side_by_side,
    tensor_groups,
    tokens_shared_with,
)
from dtobs.detectors.silent.replicas import replica_sets
from dtobs.detectors.silent.sample_ledger import streams
from dtobs.events import Kind, Phase
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import count, ranks_text

WINDOW = 64
LEAST_STEPS = 4
LEAST_BEFORE = 8
"""Steps in which ranks that nobody said anything of must have read the same, and not always the same."""
LEAST_SAMPLES, LEAST_SHARED = 64, 0.25


def data_mismatch(view: RunView) -> list[Finding]:
    """One finding for each replica whose ranks read different data."""
    found = []
    window = view.steps(WINDOW)
    tensor = [(ranks, f"the tensor-parallel group of {ranks_text(ranks)}") for ranks in tensor_groups(view)]
    given_whole, parts = _sequences(view)
    sequence = [(ranks, f"the context-parallel group of {ranks_text(ranks)}") for ranks in [*given_whole, *parts]]
    for ranks, whole in [*tensor, *sequence, *_of_one_model(view)]:
        rows = rows_of(view, ranks)
        digests = np.where(window.valid[rows], window.records["input_digest"][rows], np.uint64(0))
        known = (digests != 0).all(axis=0)
        unequal = known & (digests != digests[:1]).any(axis=0)
        if unequal.sum() < LEAST_STEPS or unequal.sum() < 0.5 * known.sum():
            continue
        if ranks in given_whole:
            reason = "each splits sequences of its own, where the group has to split the same ones"
        else:
            alike = int((known & ~unequal).sum())
            reason = _reason(view, ranks, alike) if ranks not in parts else _dealt_parts(view, ranks)
        apart = "" if reason or ranks in parts else _apart(view, ranks)
        if not reason and not apart:
            continue
        last = int(np.flatnonzero(unequal)[-1])
        odd, majority = outliers({r: int(d) for r, d in zip(ranks, digests[:, last], strict=True)})
        whom = (
            f"{ranks_text(odd)} read other data than" if majority else f"{ranks_text(odd)} read different data within"
        )
        step = _history(view, ranks).apart
        found.append(
            Finding(
                "data-mismatch",
                f"{whom} {whole}, in {int(unequal.sum())} of {int(known.sum())} steps: {reason or apart}",
                tuple(odd),
                Confidence.LIKELY if reason else Confidence.POSSIBLE,
                step=step,
                evidence=({"what": "input digests", "ranks": ranks[:64], "steps_unequal": int(unequal.sum())},),
            )
        )
    return found


def _of_one_model(view: RunView) -> Iterator[tuple[list[int], str]]:
    """Ranks whose copies were alike until they went apart, and that read the same before, in steps that were not alike.

    Only those of which nothing else says which of them read different samples.
    """
    apart = [set(group) for group in [*data_groups(view), *tensor_groups(view)]]
    for copies in replica_sets(view):
        if not copies.learned or not copies.differs[-1].any():
            continue
        together: dict[bytes, list[int]] = defaultdict(list)
        for rank, read in zip(copies.ranks, _history(view, copies.ranks).first, strict=True):
            if len(set(read.tolist())) == LEAST_BEFORE:
                together[read.tobytes()].append(rank)
        for ranks in together.values():
            if len(ranks) > 1 and not any(len(group & set(ranks)) > 1 for group in apart):
                yield ranks, f"the ranks that hold copies of {copies.names[0]} and read the same before"


@dataclass(frozen=True)
class _History:
    """What ranks read in the recorded steps, as asked for the first time."""

    first: npt.NDArray[np.uint64]  #: digests of the oldest `LEAST_BEFORE` steps, [ranks, steps]
    alike: int  #: batches that all of them read in one step, where that was the rule until they read apart
    apart: int  #: the step from which on they read apart; -1 where they do not


def _history(view: RunView, ranks: list[int]) -> _History:
    """The history of `ranks`: a phase that reads otherwise may be longer than the window, and begin between looks."""
    kept: dict[tuple[int, ...], _History] = view.memo.setdefault("data-mismatch", {})
    if (key := tuple(ranks)) not in kept:
        steps, digests = side_by_side(view, ranks, "input_digest")
        known = (digests != 0).all(axis=0)
        steps, digests = steps[known], digests[:, known]
        alike = (digests == digests[:1]).all(axis=0)
        until = int(np.flatnonzero(alike)[-1]) + 1 if alike.any() else 0
        common = len(np.unique(digests[0, alike])) if 2 * alike.sum() > until else 0
        apart = int(steps[until]) if until < len(steps) else -1
        kept[key] = _History(digests[:, :LEAST_BEFORE].copy(), common, apart)
    return kept[key]


def _reason(view: RunView, ranks: list[int], alike: int) -> str:
    """Why different inputs of these ranks cannot be parts of one batch; "" where they can.

    `alike` counts the steps of the window in which they read the same.
    """
    if shared := [rank for rank in ranks if set(ranks) <= set(tokens_shared_with(view, rank))]:
        return f"the embedding of rank {shared[0]} takes the tokens of all of them to be the same (Replicate)"
    if (alike := max(alike, _history(view, ranks).alike)) >= LEAST_STEPS:
        return f"in {alike} others it was the same"
    if dealt := _dealt(view, ranks):
        return dealt
    read = [np.unique(stream.digests) for stream in streams(view, ranks)]
    if len(read) > 1 and min(len(samples) for samples in read) >= LEAST_SAMPLES:
        shared = np.isin(read[0], np.concatenate(read[1:])).mean()
        if shared >= LEAST_SHARED:
            return f"{shared:.0%} of the samples of rank {ranks[0]} are read by the others in other steps"
    return ""


def _dealt(view: RunView, ranks: list[int]) -> str:
    """That a sampler deals to more ranks than there are replicas of the model; "" where none does."""
    for rank in ranks:
        dealt, replicas = dealt_to(view, rank), len(view.meta(rank).layout.get("data_ranks") or ())
        if dealt > max(1, replicas) and replicas:
            return f"the sampler deals to {dealt} ranks, and there are {count(replicas, 'replica')} of the model"
    return ""


def _dealt_parts(view: RunView, ranks: list[int]) -> str:
    """As `_dealt`, of ranks that get parts of sequences; "" where they may hand each other samples before a forward."""
    for rank in ranks:
        events, groups = view.events(rank), view.meta(rank).groups
        among = [number for number, group in groups.items() if set(group.ranks) == set(ranks)]
        outside = ~np.isin(events["phase"], (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER))
        if (outside & np.isin(events["group"], among) & np.isin(events["kind"], (Kind.COLLECTIVE, Kind.P2P))).any():
            return ""
    return _dealt(view, ranks)


def _sequences(view: RunView) -> tuple[list[list[int]], list[list[int]]]:
    """Groups of ranks among which sequences are split: those given the whole ones, and those given parts."""
    whole: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in view.ranks:
        if mesh := sequence_mesh(view, rank):
            whole[mesh].append(rank)
    given = [ranks for ranks in whole.values() if len(ranks) > 1]
    known = {rank for ranks in given for rank in ranks}
    return given, [ranks for ranks in sequence_groups(view) if not known.intersection(ranks)]


def _apart(view: RunView, ranks: list[int]) -> str:
    """That copies on `ranks` have parted since the first step, as other inputs make them; "" where they have not."""
    for copies in replica_sets(view):
        differs = copies.differs
        whole = set(copies.ranks) <= set(ranks) and len(differs) > LEAST_STEPS
        if whole and not differs[0].any() and differs[1:].any(axis=1).all():
            name = copies.names[int(differs[-1].argmax())]
            return (
                f"their copies of {name} go apart from the first step on (where each has a part of every sequence, the"
                " gradient of it is not summed over them)"
            )
    return ""
