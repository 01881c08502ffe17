"""``rank-exited-early``: a rank finished normally while its peers still train.

Why it hurts: the peers wait for a collective that will never be joined, or lose the connection. The evidence: the rank
closed its session or exited with code 0, and its last sequence number is behind what its peers wait in.
"""

from __future__ import annotations

from dtobs.detectors.hangs.describe import group_name, waiters, waiting_evidence
from dtobs.detectors.hangs.endings import End
from dtobs.detectors.hangs.situation import LEFT, Absence, Situation, Told
from dtobs.findings import Confidence, Finding
from dtobs.words import ranks_text

_LEFT_NEXT = "Look at what made this rank leave (sys.exit, an error it handled) while its peers went on."


def find(situation: Situation, left: frozenset[int]) -> Told:
    """One finding for all ranks that left their peers waiting."""
    lost = any(e.kind is End.PEER_LOST for e in situation.endings.values())
    gone = [a for a in situation.absences if situation.endings[a.rank].kind in LEFT and a.rank in left]
    return situation.told([_finding(situation, gone)] if gone and (situation.stuck or lost) else [])


def _finding(situation: Situation, gone: list[Absence]) -> Finding:
    view = situation.view
    ranks = tuple(a.rank for a in gone)
    first = gone[0]
    done, others = (int(view.page(r)["steps_done"]) for r in (first.rank, first.waiting[0]))
    steps = f" after {done} steps, of which its peers did {others}" if done != others else f" after {done} steps"
    return Finding(
        "rank-exited-early",
        f"{ranks_text(ranks)} {_how(situation, first.rank)}{steps}, {_peers(situation, first, len(ranks))}",
        ranks,
        Confidence.CERTAIN,
        step=int(view.page(first.rank)["step"]),
        group=group_name(situation, first.group) if first.group else None,
        evidence=(
            *({"what": "end", "rank": r, "how": situation.endings[r].kind.value} for r in ranks[:8]),
            *waiting_evidence(situation, first),
        ),
        next_step="" if not situation.endings[first.rank].exit_code else _LEFT_NEXT,
        since_ns=first.since_ns,
    )


def _peers(situation: Situation, absence: Absence, count: int) -> str:
    lost = [rank for rank in absence.waiting if situation.endings[rank].kind is End.PEER_LOST]
    if absence.group or not lost:
        return f"while {waiters(situation, absence)}"
    return f"and {ranks_text(lost)} lost the connection to {'it' if count == 1 else 'them'}"


def _how(situation: Situation, rank: int) -> str:
    return situation.endings[rank].left_by or "ended normally"
