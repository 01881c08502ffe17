"""data-uneven: data-parallel ranks train on batches of different size, in every step alike.

What it does: counts the samples of each step (rows of the batch, all micro-batches together; `sample_ledger`). Where
every rank of a data-parallel group has the same count in all its steps, and not all have the same one, the average of
gradients weighs their samples unequally, unless their losses make up for it. That is known of a cross-entropy
(`loss_weights`); of other losses the finding is only possible. Batches that vary from step to step (packing, padding,
last batches) are left alone, and so is what ``session.policy(data="uneven")`` declares.

Why it hurts: samples of the ranks with smaller batches count more than the others', and the larger ones are waited for.
"""

from __future__ import annotations

from collections.abc import Iterable

from dtobs.detectors.peers import data_groups, outliers
from dtobs.detectors.silent.loss_weights import weights_of
from dtobs.detectors.silent.sample_ledger import streams
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import count, ranks_do

LEAST_STEPS = 8
ALIKE = 1.1
"""Weights of a sample, or of a token, that are no further apart count as the same."""


def data_uneven(view: RunView) -> list[Finding]:
    """One finding for each data-parallel group."""
    found = []
    for group in data_groups(view):
        if {view.meta(rank).policy.get("data") for rank in group} & {"uneven", "same"}:
            continue
        sizes: dict[int, int] = {}
        first = 0
        for stream in streams(view, group):
            # In the first step a pipeline asks its stages what they make of a batch; the newest may still be written.
            rows = stream.batches[1:-1, 1]
            if len(rows) >= LEAST_STEPS and (rows == rows[0]).all():
                sizes[stream.rank], first = int(rows[0]), int(stream.batches[0, 0])
        if len(sizes) < len(group) or len(set(sizes.values())) == 1:
            continue
        weights = weights_of(view, group)
        if weights and (
            _alike(weight / sizes[rank] for rank, (weight, _) in weights.items())
            or _alike(weight / tokens for weight, tokens in weights.values())
        ):
            continue
        odd, majority = outliers(sizes)
        others = sorted(set(group) - set(odd)) or odd[1:]
        said = (
            f"{ranks_do(odd, 'train')} on {count(sizes[odd[0]], 'sample')} a step, the others on {sizes[others[0]]:,}"
            if majority
            else ", ".join(f"rank {rank} trains on {count(sizes[rank], 'sample')} a step" for rank in odd[:4])
        )
        found.append(
            Finding(
                "data-uneven",
                f"{said}: averaged gradients weigh them unequally"
                + ("" if weights else ", unless the losses make up for it"),
                tuple(odd),
                Confidence.LIKELY if weights else Confidence.POSSIBLE,
                step=first,
                evidence=({"what": "samples a step", "by_rank": {str(r): n for r, n in sorted(sizes.items())[:64]}},),
            )
        )
    return found


def _alike(weights: Iterable[float]) -> bool:
    each = list(weights)
    return max(each) <= ALIKE * min(each)
