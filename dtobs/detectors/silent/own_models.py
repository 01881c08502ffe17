"""gradients-not-synchronized: ranks that began alike and work together, but each trains a model of its own.

What it does: looks at ranks of which nothing says who holds copies. They hold the same tensors, began with the same
values, train with the same settings and call collectives in nearly every step; and since the first step all that moves
differs between all of them, and in no step as much travelled between them as a gradient has. It is only possible that
this is a mistake: models may be kept apart on purpose, and averaged later than after `FIRST_PERIOD` steps. Ranks that
call nothing, send each other messages (a pipeline) or began differently (an ensemble) are left alone.

Why it hurts: nobody averages the gradients, so each model learns from its own rank's samples only.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import numpy as np

from dtobs.detectors.silent.config_mismatch import settings_of
from dtobs.detectors.silent.learned_copies import learned_keys
from dtobs.detectors.silent.replica_divergence import FIRST_PERIOD
from dtobs.events import Kind
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import count, ranks_text

MOST_RANKS = 256


def own_models(view: RunView) -> list[Finding]:
    """One finding for each set of ranks that began alike."""
    alike: dict[object, list[int]] = defaultdict(list)
    for rank in view.ranks if 1 < len(view.ranks) <= MOST_RANKS else ():
        meta = view.meta(rank)
        if not meta.params or meta.pipeline or any(p.replica for p in meta.params):
            continue
        history = view.digests(rank)
        if len(history) > 1 and "digest" in (history.dtype.names or ()):
            table = tuple((p.name, p.shape, p.dtype) for p in meta.params)
            alike[table, history["digest"][0].tobytes(), int(history["step"][0])].append(rank)
    sets = [ranks for ranks in alike.values() if len(ranks) > 1]
    learned: dict[int, set[str]] = defaultdict(set)
    for (rank, _), key in learned_keys(view).items() if sets else ():
        learned[rank].add(key)
    unmet = [ranks for ranks in sets if not set.intersection(*(learned[rank] for rank in ranks))]
    return [found for ranks in unmet if (found := _judge(view, ranks)) is not None]


def _judge(view: RunView, ranks: list[int]) -> Finding | None:
    histories = [view.digests(rank) for rank in ranks]
    common = set.intersection(*(set(h["step"].tolist()) for h in histories))
    looks = np.stack([h["digest"][np.isin(h["step"], list(common))] for h in histories])  # [ranks, looks, rows]
    if looks.shape[1] < 2 or max(common) - min(common) < FIRST_PERIOD:
        return None
    moves = (looks[:, 1:] != looks[:, :-1]).any(axis=(0, 1))
    some = np.sort(looks[:, 1:, moves], axis=0)
    settings = [settings_of(view, rank, 1 << 62) for rank in ranks]
    apart = moves.any() and (some[1:] != some[:-1]).all()
    if not apart or settings != settings[:1] * len(ranks) or not all(_calls(view, rank, set(ranks)) for rank in ranks):
        return None
    step = int(min(common)) + 1
    return Finding(
        "gradients-not-synchronized",
        f"{ranks_text(ranks)} began with the same parameters, and each trains a model of its own: all that moves"
        f" ({count(int(moves.sum()), 'tensor')}) differs since step {step}, and no call between them was as large as a"
        " gradient",
        tuple(ranks),
        Confidence.POSSIBLE,
        step=step,
        group="own models",
        fault=False,
        evidence=({"what": "parameter digests", "looks": looks.shape[1], "tensors_that_differ": int(moves.sum())},),
    )


def _calls(view: RunView, rank: int, ranks: set[int]) -> bool:
    """Whether a rank calls collectives in most steps, none among `ranks` as large as a gradient, and sends nothing."""
    steps, events, groups = view.rank_steps(rank), view.events(rank), view.meta(rank).groups
    wanted = sum(math.prod(p.shape) for p in view.meta(rank).params)  # a fourth of it in FP32: it may be compressed
    calls = events[events["kind"] == Kind.COLLECTIVE]
    among = [number for number, group in groups.items() if ranks <= set(group.ranks)]
    bytes_by_step: Counter[int] = Counter()
    for step, size in calls[np.isin(calls["group"], among)][["step", "value"]].tolist():
        bytes_by_step[step] += size
    largest = max(bytes_by_step.values(), default=0)
    return bool(
        len(steps)
        and np.median(steps["collectives"]) > 0
        and largest < wanted
        and not (events["kind"] == Kind.P2P).any()
    )
