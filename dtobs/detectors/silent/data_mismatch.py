"""data-mismatch: tensor-parallel ranks of one replica read different data.

What it does: compares the digests of the inputs of each step between ranks that differ in their place along tensor
dimensions of the mesh only. Their layers are parts of one model, so they must be given one batch. Ranks that split a
sequence between them (context and sequence dimensions) are left out, and so are steps that are not known on all.

Why it hurts: each computes its part of every product for another sample; the sums mean nothing, and nothing raises.

What to do next: seed and shard the data by the place along data dimensions only, or broadcast each batch within the
tensor-parallel group.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from dtobs.detectors.peers import odd_ones, rows_of
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import ranks_text

WINDOW = 64
LEAST_STEPS = 4
_TENSOR = frozenset({"tensor", "tp", "tensor_parallel", "tensor-parallel"})


def data_mismatch(view: RunView) -> list[Finding]:
    """One finding for each replica whose ranks read different data."""
    found = []
    window = view.steps(WINDOW)
    for ranks in _replicas(view):
        rows = rows_of(view, ranks)
        digests = np.where(window.valid[rows], window.records["input_digest"][rows], np.uint64(0))
        known = (digests != 0).all(axis=0)
        unequal = known & (digests != digests[:1]).any(axis=0)
        if unequal.sum() < LEAST_STEPS or unequal.sum() < 0.5 * known.sum():
            continue
        last = int(np.flatnonzero(unequal)[-1])
        odd, majority = odd_ones({r: int(d) for r, d in zip(ranks, digests[:, last], strict=True)})
        whom = (
            f"{ranks_text(odd)} read other data than" if majority else f"{ranks_text(odd)} read different data within"
        )
        step = int(window.steps[int(unequal.argmax())])
        found.append(
            Finding(
                "data-mismatch",
                f"{whom} the tensor-parallel group of {ranks_text(ranks)}, in {int(unequal.sum())} of"
                f" {int(known.sum())} steps",
                tuple(odd),
                Confidence.LIKELY,
                step=step,
                evidence=({"what": "input digests", "ranks": ranks[:64], "steps_unequal": int(unequal.sum())},),
            )
        )
    return found


def _replicas(view: RunView) -> list[list[int]]:
    """Ranks at the same place along all but the tensor dimensions."""
    together: dict[tuple[tuple[str, int], ...], list[int]] = defaultdict(list)
    for rank in view.ranks:
        place = view.meta(rank).layout.get("coordinates") or {}
        if _TENSOR.intersection(place):
            rest = sorted((str(name), int(at)) for name, at in place.items() if name not in _TENSOR)
            together[tuple(rest)].append(rank)
    return [ranks for ranks in together.values() if len(ranks) > 1]
