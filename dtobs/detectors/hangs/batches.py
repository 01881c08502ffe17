"""Which batches a rank took otherwise than a peer, long before a call of theirs did not fit."""

from __future__ import annotations

import numpy as np

from dtobs.recording.view import RunView

_LEAST_STEPS, _MOST_SKIPPED = 8, 4
SKIPPED_NEXT = (
    "Look at what makes this rank skip a batch (an error that is handled, `continue`): from there on its peers average"
    " their gradients with those of another batch."
)
_SHORTER_NEXT = (
    "Give every rank as many batches (drop_last, DistributedSampler, DDP's join()), and look for one that a rank skips"
    " (an error that is handled): from that pass on, gradients of other batches are averaged."
)


def batches_apart(view: RunView, rank: int, peer: int) -> tuple[str, str]:
    """Where two ranks did not take their batches together, as the end of a sentence, and what to do; or "" twice."""
    for one, other in ((rank, peer), (peer, rank)):
        if skipped := skipped_step(view, one, other):
            return skipped.replace(" it went ", f" rank {one} went ", 1), SKIPPED_NEXT
    own, theirs = _begins(view, rank), _begins(view, peer)
    for number, (before, one, other) in enumerate(zip(own, own[1:], theirs[1:], strict=False), 1):
        if one != other:
            steps = ((one - before, rank), (other - before, peer))
            (few, short), (many, long) = sorted(steps)
            return (
                f"; pass {number} over the data had {few} steps on rank {short}, and {many} on rank {long}",
                _SHORTER_NEXT,
            )
    return "", ""


def _begins(view: RunView, rank: int) -> list[int]:
    """The steps at which the passes of the first sampler began, in order."""
    passes = view.meta(rank).passes
    return [each["step"] for each in passes if each["sampler"] == passes[0]["sampler"]]


def skipped_step(view: RunView, rank: int, peer: int) -> str:
    """Where it went through more micro-batches than it usually does, and its peer did not: it left out a step there."""
    own, other = view.rank_steps(rank), view.rank_steps(peer)
    if min(len(own), len(other)) < _LEAST_STEPS:
        return ""
    usual = int(np.median(own["micro_batches"]))
    more = own[own["micro_batches"] > usual]
    theirs = other["step"][other["micro_batches"] > usual]
    if not 0 < len(more) <= _MOST_SKIPPED or np.isin(more["step"], theirs).any():
        return ""
    steps = ", ".join(map(str, more["step"].tolist()))
    there = int(more["micro_batches"][0])
    return (
        f"; in step {steps} it went through {there} micro-batches where it usually takes {usual}, so it left out an"
        " optimizer step there, as a loop does that handles an error and goes on"
    )
