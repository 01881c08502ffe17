"""What progress and start-up lines say of a job that runs: a loss that is not finite, a transport that fell back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile

from dtobs.findings import Confidence, Finding
from dtobs.logs.evidence import Sign, Track

_RECOVERED = 3
_UNSETTLED = 24
"""PyTorch's scaler begins at 2^16 and halves: it needs no more skipped steps than that to come below 2^-8."""
_UNSCALED = 3
"""Without a scaler, or with one that multiplies by 1, a step or two may still be skipped on purpose."""
_ZERO_LOSSES = 2
_OF_ALL = (
    "Look at the batches of this step on every rank, since one prints for all; lower the learning rate or clip if"
    " gradients grew before."
)


def findings(tracks: Mapping[int | None, Track], live: Sequence[Sign]) -> list[Finding]:
    """The findings."""
    return [*(_loss(tracks) or _gradients(tracks)), *_transport(live)]


def _loss(tracks: Mapping[int | None, Track]) -> list[Finding]:
    """A loss that becomes NaN or infinite and stays so to the last line."""
    found: list[tuple[int, str, int | None, int]] = []
    for rank, track in tracks.items():
        bad = None
        finite_after = 0
        count = 0
        for step, loss, where in track.losses:
            if not math.isfinite(loss):
                bad = bad or (step, where)
                finite_after, count = 0, count + 1
            elif bad is not None:
                finite_after += 1
                if finite_after >= _RECOVERED:
                    bad, count = None, 0
        if bad is not None:
            found.append((*bad, rank, count))
    if not found:
        return []
    step, where, rank, count = min(found, key=lambda one: one[0])
    ranks = _named({rank for at, _, rank, _ in found if at == step}, [r for r, t in tracks.items() if t.losses])
    confidence = Confidence.CERTAIN if count > 1 or len(found) > 1 else Confidence.LIKELY
    at = tracks[rank].at(step)
    record = {"what": f"the loss of {at} is not finite, nor is one after it", "where": where}
    return [
        Finding(
            "loss-nonfinite",
            f"the loss is not finite from {at} on",
            ranks,
            confidence,
            step=None if tracks[rank].counted else step,
            evidence=(record,),
            next_step="" if ranks else _OF_ALL,
        )
    ]


def _gradients(tracks: Mapping[int | None, Track]) -> list[Finding]:
    """Gradients that are not finite in every one of the last lines, more often than a loss scaler needs to settle.

    A loss of exactly zero beside them is what Hugging Face's Trainer prints of a loss that is not finite.
    """
    found: list[tuple[int, str, int | None]] = []
    for rank, track in tracks.items():
        losses = {step: loss for step, loss, _ in track.losses}
        bad = list(takewhile(lambda one: not math.isfinite(one[1]), reversed(track.norms)))
        lately = [losses.get(step) == 0.0 for step, _, _ in bad[:_ZERO_LOSSES]]  # the newest first
        least = _UNSCALED if track.unscaled else _UNSETTLED
        if len(bad) >= least or (len(lately) == _ZERO_LOSSES and all(lately)):
            found.append((bad[-1][0], bad[-1][2], rank))
    if not found:
        return []
    step, where, rank = min(found, key=lambda one: one[0])
    ranks = _named({rank for at, _, rank in found if at == step}, [r for r, t in tracks.items() if t.norms])
    at = tracks[rank].at(step)
    record = {"what": f"the gradients' norm is not finite in {at} and in every line after it", "where": where}
    text = f"the norm of the gradients is not finite from {at} on"
    next_step = "Look at the batches and the loss scale of the steps before; lower the learning rate or clip earlier."
    finding = Finding(
        "gradient-nonfinite",
        text,
        ranks,
        Confidence.LIKELY,
        step=None if tracks[rank].counted else step,
        evidence=(record,),
        next_step=next_step,
    )
    return [finding]


def _named(bad: set[int | None], told: Sequence[int | None]) -> tuple[int, ...]:
    """Who to name: nobody where one rank prints for all of them, which says nothing of where it came from."""
    return tuple(sorted(rank for rank in bad if rank is not None)) if len(told) > 1 else ()


def _transport(live: Sequence[Sign]) -> list[Finding]:
    """Sockets between hosts although InfiniBand is there; nothing where a person chose them."""
    if any(s.kind == "set-by-hand" for s in live):
        return []
    sockets = [s for s in live if s.kind == "transport" and s.fields.get("transport", "").startswith("NET/Socket")]
    better = [s for s in live if s.kind == "ib-found" and "mlx" in s.fields.get("hca", "")]
    better += [s for s in live if s.kind == "transport" and s.fields.get("transport", "").startswith("NET/IB")]
    problem = [s for s in live if s.kind == "transport-problem" and "P2P" not in s.text]
    if not sockets or not (better or problem):
        return []
    ranks = tuple(sorted({int(s.fields["rank"]) for s in sockets}))
    sure = bool(better) or not all("libibverbs" in s.text for s in problem)  # most hosts without it have no InfiniBand
    reason = problem[0] if problem else better[0]
    return [
        Finding(
            "transport-fallback",
            "NCCL sends between hosts through sockets although it has or seeks something faster",
            ranks,
            Confidence.LIKELY if sure else Confidence.POSSIBLE,
            evidence=tuple({"what": s.text, "rank": s.rank, "where": s.where} for s in (sockets[0], reason)),
        )
    ]
