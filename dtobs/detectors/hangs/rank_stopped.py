"""``rank-stopped``: the process of a rank is suspended (SIGSTOP, a debugger, job control).

Why it hurts: nobody exits and nothing is logged; the peers wait until their timeout. The evidence is the kernel's
state of the process, T or t.
"""

from __future__ import annotations

from dtobs.detectors.hangs.absent import together
from dtobs.detectors.hangs.describe import stack_evidence, waiters, waiting_evidence, where
from dtobs.detectors.hangs.situation import Situation, Told
from dtobs.findings import Confidence, Finding
from dtobs.words import ranks_do


def find(situation: Situation, left: frozenset[int]) -> Told:
    """One finding for each collective that suspended ranks are missing in."""
    found = []
    mine = [rank for rank, code in situation.halted.items() if code == "rank-stopped" and rank in left]
    for ranks, absence in together(situation, mine):
        processes = [p for rank in ranks if (p := situation.view.process(rank)) is not None]
        traced = any(p.state == "t" for p in processes)
        peers = f"; {waiters(situation, absence)}" if absence.waiting else ""
        pids = " ".join(str(p.pid) for p in processes[:8])
        found.append(
            Finding(
                "rank-stopped",
                f"{ranks_do(ranks, 'are')} suspended{' by a debugger' if traced else ''} (pid {pids}), "
                f"{where(situation, ranks[0])}{peers}",
                ranks,
                Confidence.CERTAIN,
                step=int(situation.view.page(ranks[0])["step"]),
                evidence=(*stack_evidence(situation, ranks[0]), *waiting_evidence(situation, absence)),
                next_step="" if traced else f"Resume with `kill -CONT {pids}`, and find out who stopped it.",
                since_ns=int(situation.view.page(ranks[0])["heartbeat_ns"]),
            )
        )
    return situation.told(found)
