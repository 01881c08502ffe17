"""data-repeat: every epoch reads a shuffled data set in the same order, or every worker the same stream.

What it does: a DistributedSampler shuffles by its seed and its epoch. Each pass that training made over its data is on
record with both; a sampler that was to shuffle and had the same ones in all passes gave the same order in each (two
passes alike may be two phases of one epoch: that is possible, three are certain). Passes of loaders that nothing is
trained with, and samplers that were not to shuffle, say nothing. A loader that shuffles by
itself (``shuffle=True``) has no epoch: there the inputs of the first steps of two passes are compared. Of a stream that
several workers of a loader read, the inputs of successive steps are: where each comes as often in a row as there are
workers, each worker reads all of it.

Why it hurts: batches are the same ones in every epoch, on every rank: less random than the job was meant to be, and
the loss over an epoch shows the pattern of the order.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter

from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import ranks_text, verb

LEAST_STEPS = 4
LEAST_RUNS = 6
"""Batches that come several times in a row."""
LEAST_PASSES = 3
"""Passes that begin alike: one may be done again on purpose, from a checkpoint."""


def data_repeat(view: RunView) -> list[Finding]:
    """One finding for all ranks whose sampler repeats its order."""
    return [*_by_epoch(view), *_by_inputs(view), *_by_workers(view)]


def _by_workers(view: RunView) -> list[Finding]:
    """Streams that every worker of a loader reads from the beginning: batches come in turn, so each several times."""
    found: dict[int, tuple[int, int]] = {}  # by rank: the workers, the first step that repeats one
    for rank in view.ranks:
        workers, history = view.meta(rank).process.get("stream_workers"), view.rank_steps(rank)
        if not isinstance(workers, int) or workers < 2 or not len(history):
            continue
        runs = [len(list(run)) for digest, run in itertools.groupby(history["input_digest"].tolist()) if digest]
        inner = runs[1:-1]  # the others may be cut off
        if len(inner) >= LEAST_RUNS and set(inner) == {workers}:
            found[rank] = workers, int(history["step"][0]) + 1
    if not found:
        return []
    workers, step = found[min(found)]
    return [
        Finding(
            "data-repeat",
            f"{ranks_text(found)} {verb(len(found), 'read')} each batch {workers} times in a row: the {workers} workers"
            " of the loader read the same stream",
            tuple(found),
            Confidence.LIKELY,
            step=step,
            aspect="workers",
            next_step="Give each worker a part of the stream in the data set's __iter__, by"
            " torch.utils.data.get_worker_info(), beside the part of the rank.",
            evidence=({"what": "input digests of successive steps", "workers": workers},),
        )
    ]


def _by_inputs(view: RunView) -> list[Finding]:
    """Loaders that shuffle by a generator which begins anew with every pass."""
    repeats: dict[int, tuple[int, int]] = {}  # by rank: passes that began alike, the step of the third
    for rank in view.ranks:
        passes = [p for p in view.meta(rank).passes if p["shuffles"] and p["replicas"] == 1]
        history = view.rank_steps(rank)
        begins: Counter[tuple[int, ...]] = Counter()
        ends = [*(float(p["step"]) for p in passes[1:]), math.inf]
        for each, end in zip(passes, ends[: len(passes)], strict=True):
            inside = (history["step"] >= each["step"]) & (history["step"] < end)
            inputs = tuple(history["input_digest"][inside][:LEAST_STEPS].tolist())
            if len(set(inputs)) == LEAST_STEPS and 0 not in inputs:
                begins[each["sampler"], *inputs] += 1
                if begins[each["sampler"], *inputs] == LEAST_PASSES:
                    repeats.setdefault(rank, (0, each["step"]))
        if rank in repeats:
            repeats[rank] = (max(begins.values()), repeats[rank][1])
    if not repeats:
        return []
    times, step = repeats[min(repeats)]
    whose = "every rank reads its" if len(repeats) == len(view.ranks) else f"{ranks_text(repeats)} read their"
    return [
        Finding(
            "data-repeat",
            f"{whose} shuffled data in the same order in {times} passes: the generator that shuffles is seeded anew"
            " before each",
            tuple(repeats),
            Confidence.LIKELY,
            step=step,
            aspect="seeded anew",
            evidence=({"what": "input digests at the begin of passes", "passes": view.meta(min(repeats)).passes[:16]},),
        )
    ]


def _by_epoch(view: RunView) -> list[Finding]:
    """Samplers whose epoch never moves: one that moves and is read twice is read twice on purpose."""
    repeats: dict[int, tuple[int, int, int]] = {}  # by rank: passes alike, their epoch, the step of the second
    for rank in view.ranks:
        samplers: dict[int, list[dict[str, int]]] = {}
        for each in view.meta(rank).passes:
            if each["shuffles"] and each["replicas"] > 1:
                samplers.setdefault(each["sampler"], []).append(each)
        for passes in samplers.values():
            if len(passes) > 1 and len({(p["seed"], p["epoch"]) for p in passes}) == 1:
                repeats[rank] = max(repeats.get(rank, (0, 0, 0)), (len(passes), passes[0]["epoch"], passes[1]["step"]))
    if not repeats:
        return []
    count, epoch, step = repeats[min(repeats)]
    whose = "every rank reads its" if len(repeats) == len(view.ranks) else f"{ranks_text(repeats)} read their"
    return [
        Finding(
            "data-repeat",
            f"{whose} shuffled data in the same order in {count} passes: the sampler's epoch stays {epoch}",
            tuple(repeats),
            Confidence.CERTAIN if count >= LEAST_PASSES else Confidence.POSSIBLE,
            step=step,
            evidence=(
                {
                    "what": "passes over training data",
                    "passes": view.meta(min(repeats)).passes[:16],
                },
            ),
        )
    ]
