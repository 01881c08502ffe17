"""data-mismatch: tensor-parallel ranks of one replica read different data.

What it does: compares the digests of the inputs of each step between ranks that differ in their place along tensor
dimensions of the mesh only. Their layers are parts of one model, so they must be given one batch, unless they split
each sequence between them before the model sees it. So there must be a reason to know better: the inputs were equal
before, or the ranks read each other's samples in other steps, or a DistributedSampler deals to more ranks than
there are replicas of the model.

Why it hurts: each computes its part of every product for another sample; the sums mean nothing, and nothing raises.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.typing as npt

from dtobs.detectors.peers import outliers, rows_of
from dtobs.detectors.silent.sample_ledger import streams
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import count, ranks_text

WINDOW = 64
LEAST_STEPS = 4
LEAST_SAMPLES, LEAST_SHARED = 64, 0.25
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
        reason = _reason(view, ranks, known & ~unequal)
        if not reason:
            continue
        last = int(np.flatnonzero(unequal)[-1])
        odd, majority = outliers({r: int(d) for r, d in zip(ranks, digests[:, last], strict=True)})
        whom = (
            f"{ranks_text(odd)} read other data than" if majority else f"{ranks_text(odd)} read different data within"
        )
        step = int(window.steps[int(unequal.argmax())])
        found.append(
            Finding(
                "data-mismatch",
                f"{whom} the tensor-parallel group of {ranks_text(ranks)}, in {int(unequal.sum())} of"
                f" {int(known.sum())} steps: {reason}",
                tuple(odd),
                Confidence.LIKELY,
                step=step,
                evidence=({"what": "input digests", "ranks": ranks[:64], "steps_unequal": int(unequal.sum())},),
            )
        )
    return found


def _reason(view: RunView, ranks: list[int], equal: npt.NDArray[np.bool_]) -> str:
    """Why different inputs of these ranks cannot be parts of one batch; "" where they can."""
    if equal.sum() >= LEAST_STEPS:
        return f"in {int(equal.sum())} others it was the same"
    for rank in ranks:
        meta = view.meta(rank)
        dealt = max((each["replicas"] for each in meta.passes), default=0)
        replicas = len(meta.layout.get("data_ranks") or ())
        if dealt > max(1, replicas) and replicas:
            return f"the sampler deals to {dealt} ranks, and there are {count(replicas, 'replica')} of the model"
    read = [np.unique(stream.digests) for stream in streams(view, ranks)]
    if len(read) > 1 and min(len(samples) for samples in read) >= LEAST_SAMPLES:
        shared = np.isin(read[0], np.concatenate(read[1:])).mean()
        if shared >= LEAST_SHARED:
            return f"{shared:.0%} of the samples of rank {ranks[0]} are read by the others in other steps"
    return ""


def _replicas(view: RunView) -> list[list[int]]:
    """Ranks at the same place along all but the tensor dimensions.

    Where two ranks are at the same place along all dimensions, the mesh is a part of the job's: its other dimensions
    are not known, and so neither are the replicas.
    """
    together: dict[tuple[tuple[str, int], ...], list[int]] = defaultdict(list)
    taken: set[tuple[tuple[str, int], ...]] = set()
    for rank in view.ranks:
        place = view.meta(rank).layout.get("coordinates") or {}
        if _TENSOR.intersection(place):
            whole = tuple(sorted((str(name), int(at)) for name, at in place.items()))
            if whole in taken:
                return []
            taken.add(whole)
            together[tuple(at for at in whole if at[0] not in _TENSOR)].append(rank)
    return [ranks for ranks in together.values() if len(ranks) > 1]
