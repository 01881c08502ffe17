"""``gil-held``: native code holds a rank's Python lock, so nothing written in Python moves on that rank.

Why it hurts: data loaders, hooks, watchdogs and signal handlers in Python all stop; tools that ask Python for a stack
hang as well. The evidence is that native threads of the process answered while Python did not.
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
)
from dtobs.detectors.hangs.situation import Situation, Told
from dtobs.findings import Confidence, Finding
from dtobs.words import ranks_text


def find(situation: Situation, left: frozenset[int]) -> Told:
    """One finding for each collective that ranks are missing in because their Python lock is held."""
    found = []
    mine = [rank for rank, code in situation.halted.items() if code == "gil-held" and rank in left]
    for ranks, absence in together(situation, mine):
        line, waits = line_of(situation, ranks[0]), waits_there(situation, ranks[0])
        peers = f"; {waiters(situation, absence)}" if absence.waiting else ""
        found.append(
            Finding(
                "gil-held",
                f"native code holds the Python lock of {ranks_text(ranks)}{f' {line}' if line else ''}{waits}: "
                f"its native threads answered and Python did not{peers}{still_working(situation, ranks)}",
                ranks,
                Confidence.CERTAIN if situation.overdue(ranks) else Confidence.LIKELY,
                step=int(situation.view.page(ranks[0])["step"]),
                evidence=(
                    {"what": "python lock", "rank": ranks[0], "state": "held"},
                    *waiting_evidence(situation, absence),
                    *stack_evidence(situation, ranks[0]),
                ),
                since_ns=int(situation.view.page(ranks[0])["heartbeat_ns"]),
            )
        )
    return situation.told(found)
