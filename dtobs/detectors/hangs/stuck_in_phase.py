"""``stuck-in-dataloader`` and ``stuck-in-checkpoint``: a rank does not come back from its data or from a checkpoint.

Why it hurts: the whole job waits for one loader or for storage that hangs (a full quota, a lost mount), and the error,
when it comes, is a communication timeout on every *other* rank. The evidence is the phase the rank is in, or a frame of
the loader's or the checkpoint's code in its stack.
"""

from __future__ import annotations

from dtobs.detectors.hangs.absent import together
from dtobs.detectors.hangs.describe import (
    line_of,
    stack_evidence,
    still_working,
    waiters,
    waiting_evidence,
    waits_there,
    working_evidence,
)
from dtobs.detectors.hangs.situation import Situation, Told
from dtobs.events import Phase
from dtobs.findings import Confidence, Finding
from dtobs.words import duration_text, ranks_text, verb

_CODES = (
    ("stuck-in-dataloader", Phase.DATA, ("torch/utils/data/",), "waited {taken} for data"),
    (
        "stuck-in-checkpoint",
        Phase.CHECKPOINT,
        ("torch/distributed/checkpoint/", "torch/serialization.py", "safetensors/"),
        "been in a checkpoint for {taken}",
    ),
)
"""Code, phase, files that are on a stack meanwhile, and what the ranks have done for how long."""


def find(situation: Situation, left: frozenset[int]) -> Told:
    """One finding for all ranks that wait for their data, one for those in a checkpoint."""
    found = []
    idle = [rank for rank in situation.idle if rank in left]
    for code, phase, files, doing in _CODES:
        mine = [rank for rank in idle if _is_in(situation, rank, phase, files)]
        idle = [rank for rank in idle if rank not in mine]
        if mine:
            found.append(_finding(situation, mine, code, phase, doing))
    return situation.told(found)


def _is_in(situation: Situation, rank: int, phase: Phase, files: tuple[str, ...]) -> bool:
    stack = situation.main_stack(rank)
    return int(situation.view.page(rank)["phase"]) == phase or (stack is not None and stack.mentions(*files))


def _finding(situation: Situation, mine: list[int], code: str, phase: Phase, doing: str) -> Finding:
    ((ranks, absence),) = together(situation, mine)
    page = situation.view.page(ranks[0])
    since = int(page["phase_begin_ns"])
    taken = duration_text((situation.view.now_ns - since) / 1e9)
    line = line_of(situation, ranks[0]) + waits_there(situation, ranks[0])
    peers = f", while {waiters(situation, absence)}" if absence.waiting else ""
    does = f"{verb(len(ranks), 'have')} {doing.format(taken=taken)}"
    sure = situation.main_stack(ranks[0]) is not None and situation.overdue(ranks)
    return Finding(
        code,
        f"{ranks_text(ranks)} {does}{f' {line}' if line else ''}{peers}{still_working(situation, ranks)}",
        ranks,
        Confidence.CERTAIN if sure else Confidence.LIKELY,
        step=int(page["step"]),
        evidence=(
            {"what": "phase", "rank": ranks[0], "phase": phase.name.lower(), "for": taken},
            *waiting_evidence(situation, absence),
            *working_evidence(situation, ranks[0]),
            *stack_evidence(situation, ranks[0]),
        ),
        since_ns=since,
    )
