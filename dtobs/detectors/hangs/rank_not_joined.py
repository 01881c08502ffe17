"""``rank-not-joined``: a rank lives and never issued the collective that its peers wait in.

Why it hurts: the peers wait until their timeout, and their error messages name themselves, not the rank that is
missing. The evidence is the issue frontier: the last sequence number of every rank in that group. Where the rank is
instead comes from its stack at the capture, else from its phase and its last call.

What to do next: look at the line this rank is at. Usually code that only some ranks run (``if rank == 0``), a branch
that depends on data, or a host-side operation that takes very long there.
"""

from __future__ import annotations

from dtobs.detectors.hangs.absent import together
from dtobs.detectors.hangs.describe import (
    group_name,
    stack_evidence,
    still_working,
    waiters,
    waiting_evidence,
    where,
    working_evidence,
)
from dtobs.detectors.hangs.situation import Situation, Told
from dtobs.findings import Confidence, Finding
from dtobs.words import duration_text, ranks_do, ranks_text


def find(situation: Situation, left: frozenset[int]) -> Told:
    """One finding for all ranks that are missing where their peers wait, and of which nobody knows why."""
    found: list[Finding] = []
    missing = [a.rank for a in situation.absences if a.rank in situation.idle and a.rank in left]
    for ranks, absence in together(situation, missing):
        verb = "is" if len(ranks) == 1 else "are, the first of them,"
        seen = situation.main_stack(ranks[0]) is not None
        awaited = bool(absence.waiting) and situation.blocked[absence.waiting[0]].peer < 0
        sure = bool(absence.group) and (seen or awaited) and situation.overdue(ranks)
        found.append(
            Finding(
                "rank-not-joined",
                f"{ranks_do(ranks, 'have')} not joined: {waiters(situation, absence)}, "
                f"and {ranks_text(ranks)} {verb} {where(situation, ranks[0])}{_quiet(situation, ranks[0])}"
                f"{still_working(situation, ranks)}",
                ranks,
                Confidence.CERTAIN if sure else Confidence.LIKELY,
                step=int(situation.view.page(ranks[0])["step"]),
                group=group_name(situation, absence.group) if absence.group else None,
                evidence=(
                    *waiting_evidence(situation, absence),
                    *working_evidence(situation, ranks[0]),
                    *stack_evidence(situation, ranks[0]),
                ),
                since_ns=absence.since_ns,
            )
        )
    return situation.told(found)


def _quiet(situation: Situation, rank: int) -> str:
    page = situation.view.page(rank)
    silent = (situation.view.now_ns - int(page["heartbeat_ns"])) / 1e9
    return f" and has not been heard of for {duration_text(silent)}" if silent > 1 else ""
