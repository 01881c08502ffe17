"""gradients-not-synchronized: ranks that began alike and work together, but each trains a model of its own.

What it does: looks at ranks of which nothing says who holds copies. They hold the same tensors, began with the same
values, train with the same settings, and call collectives in nearly every step or have their samples dealt to them by
a DistributedSampler; and since the first step all that moves differs between all of them, and in no step as much
travelled between them as a gradient has. It is only possible that this is a mistake: models may be kept apart on
purpose, and averaged later than after `FIRST_PERIOD` steps. Ranks that have nothing in common, send each other messages
(a pipeline), read the same samples or began differently (an ensemble) are left alone. The same is asked of single
tensors of a model whose others are sharded or averaged, and of a whole model beside such a one, where nothing is
exchanged as experts do; they may lie in no module, as a temperature outside of DDP.

Why it hurts: nobody averages the gradients, so each model learns from its own rank's samples only.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dtobs.detectors.peers import dealt_to, of_own_sequences
from dtobs.detectors.silent.averaged_in_parts import ALONE, averaged_in_parts, works_together
from dtobs.detectors.silent.config_mismatch import settings_of
from dtobs.detectors.silent.learned_copies import LEARNED, learned_keys
from dtobs.detectors.silent.replica_divergence import FIRST_PERIOD
from dtobs.findings import Confidence, Finding
from dtobs.recording.meta import Parameter
from dtobs.recording.view import RunView
from dtobs.words import count, ranks_text

MOST_RANKS = 256
PARTED = 3
"""The look from which on what is not averaged differs: Adam moves a single number by the learning rate at first."""
MOST_LEFT_OUT = 0.25
"""The share of a model's elements that is likely to have been forgotten; of several models whole ones are as well."""
_FURTHER = re.compile(r"model \d+\.")
"""What the names of parameters of a second model begin with (`probes.layout`)."""


def own_models(view: RunView) -> list[Finding]:
    """One finding for each set of ranks that began alike, with those of `averaged_in_parts`."""
    ranks = view.ranks if 1 < len(view.ranks) <= MOST_RANKS else []
    learned = learned_keys(view) if ranks else {}
    alike: dict[_Left, list[int]] = defaultdict(list)
    for rank in ranks:
        left = _left_out(view, rank, learned)
        if left is not None:
            alike[left].append(rank)
    found = [f for left, ranks in alike.items() if len(ranks) > 1 and (f := _judge(view, ranks, left)) is not None]
    told = {f.ranks for f in found}
    return [*found, *(f for f in averaged_in_parts(view) if f.ranks not in told)]


def parted_since(view: RunView, rows: Mapping[int, list[int]]) -> tuple[list[str], int, int]:
    """The tensors that are different on each rank after a step, how many of them were alike at first, and which step.

    Those that were alike at first come first. `rows` are those of each rank's table that are asked for; the step is the
    newest of which all ranks have a look. Of a long run the beginning is not known any more.
    """
    histories = {rank: view.digests(rank) for rank in rows}
    if len(rows) < 2 or not all(map(len, histories.values())):
        return [], 0, 0
    begins, ends = ({int(h["step"][at]) for h in histories.values()} for at in (0, -1))
    first, last = max(begins), min(ends)
    values: list[dict[tuple[str, tuple[int, ...]], list[int]]] = [defaultdict(list), defaultdict(list)]
    for rank, history in histories.items():
        for found, step in zip(values, (first, last), strict=True):
            look = history["digest"][history["step"] == step]
            for row in rows[rank] if len(look) and rows[rank] and rows[rank][-1] < look.shape[1] else ():
                tensor = view.meta(rank).params[row]
                found[tensor.name, tuple(tensor.shape)].append(int(look[-1][row]))
    began, now = values
    parted = [tensor for tensor, each in now.items() if len(each) == len(rows) == len(set(each))]
    alike = [tensor for tensor in parted if len(began[tensor]) == len(rows) and len(set(began[tensor])) == 1]
    return [name for name, _ in sorted(parted, key=lambda tensor: tensor not in alike)], len(alike), last


@dataclass(frozen=True)
class _Left:
    """The tensors of a rank of which nothing tells copies, what they began with, and whether they are all it has."""

    rows: tuple[int, ...]
    tensors: tuple[tuple[str, tuple[int, ...]], ...]  #: their names and shapes
    began: bytes
    step: int
    everything: bool


def _left_out(view: RunView, rank: int, learned: Mapping[tuple[int, int], str]) -> _Left | None:
    meta, history = view.meta(rank), view.digests(rank)
    sharded = any(p.replica.partition("/")[2] for p in meta.params)
    everywhere = f"{LEARNED}:{len(view.ranks)}:"

    def is_left(row: int) -> bool:
        key = learned.get((rank, row), "")
        if meta.params[row].counts:
            return False
        # Beside shards, one that is alike on some ranks only is what each of those made of the same samples.
        nowhere = not meta.params[row].replica or meta.params[row].replica.startswith(ALONE)
        return nowhere and (not key or (sharded and not key.startswith(everywhere)))

    rows = tuple(filter(is_left, range(len(meta.params))))
    if not rows or meta.pipeline or len(history) < 2 or "digest" not in (history.dtype.names or ()):
        return None
    if history["digest"].shape[1] <= rows[-1]:
        return None  # the table was written anew since
    sizes = [0 if p.counts else math.prod(p.shape) for p in meta.params]
    everything = len(rows) == sum(not p.counts for p in meta.params)
    share = sum(sizes[row] for row in rows) / max(1, sum(sizes))
    if not everything and share > MOST_LEFT_OUT and not _whole_models(meta.params, rows):
        return None  # each rank has experts, or layers, of its own
    tensors = tuple((meta.params[row].name, tuple(meta.params[row].shape)) for row in rows)
    began, step = history["digest"][0][list(rows)].tobytes(), int(history["step"][0])
    return _Left(rows, tensors, began, step, everything)


def _whole_models(params: Sequence[Parameter], rows: tuple[int, ...]) -> bool:
    """Whether these are all parameters of some of the models that a job trains, as of one that nobody wrapped."""
    models: dict[str, set[bool]] = defaultdict(set)
    for row, parameter in enumerate(params):
        if not parameter.counts:
            further = _FURTHER.match(parameter.name)
            models[further[0] if further else ""].add(row in rows)
    return all(len(left) == 1 for left in models.values())


def _judge(view: RunView, ranks: list[int], left: _Left) -> Finding | None:
    histories = [view.digests(rank) for rank in ranks]
    common = set.intersection(*(set(h["step"].tolist()) for h in histories))
    looks = np.stack(
        [h["digest"][np.isin(h["step"], list(common))][:, left.rows] for h in histories]
    )  # [ranks, looks, rows]
    if looks.shape[1] <= PARTED or max(common) - min(common) < FIRST_PERIOD:
        return None
    moves = (looks[:, 1:] != looks[:, :-1]).any(axis=(0, 1))
    some = np.sort(looks[:, PARTED:, moves], axis=0)
    settings = [settings_of(view, rank, 1 << 62) for rank in ranks]
    apart = moves.any() and ((some[1:] != some[:-1]).all() if left.everything else (some[0] != some[-1]).all())
    if not apart or settings != settings[:1] * len(ranks):
        return None
    if not all(works_together(view, rank, set(ranks), left.everything) for rank in ranks) or _read_alike(view, ranks):
        return None
    step, moving = int(min(common)) + 1, int(moves.sum())
    if left.everything:
        text = (
            f"{ranks_text(ranks)} began with the same parameters, and each trains a model of its own: all that moves"
            f" ({count(moving, 'tensor')}) differs since step {step}, and no call between them was as large as a"
            " gradient"
        )
        dealt = dealt_to(view, ranks[0])
        text += f"; a DistributedSampler deals their samples to {dealt} ranks" if dealt > 1 else ""
    else:
        first = left.tensors[int(moves.argmax())][0]
        more = f" and {count(moving - 1, 'other tensor')}" if moving > 1 else ""
        text = (
            f"the copies of {first}{more} on {ranks_text(ranks)} began alike and have gone apart since step"
            f" {step}: nothing shards them or averages their gradients, as is done for the rest of the model"
        )
    return Finding(
        "gradients-not-synchronized",
        text,
        tuple(ranks),
        Confidence.POSSIBLE,
        step=step,
        aspect="own models",
        fault=False,
        evidence=({"what": "parameter digests", "looks": looks.shape[1], "tensors_that_differ": moving},),
    )


def _read_alike(view: RunView, ranks: list[int]) -> bool:
    """Whether `ranks` read the same samples in most steps, as those do that hold parts of one model.

    Those that split sequences between them read parts.
    """
    if len(of_own_sequences(view, ranks)) < len(ranks):
        return False
    read = [
        {int(s): int(d) for s, d in view.rank_steps(rank)[["step", "input_digest"]].tolist() if d} for rank in ranks
    ]
    common = set.intersection(*(set(each) for each in read))
    return sum(len({each[step] for each in read}) == 1 for step in common) > 0.5 * len(common) > 0
