"""``rank-oom-killed``: the kernel killed a rank because the host or its container ran out of memory.

Why it hurts: it looks like any SIGKILL, and comes back at the same place after every restart. The evidence is the
exit by SIGKILL together with the kernel's own count of such kills.
"""

from __future__ import annotations

from dtobs.detectors.hangs.describe import stack_evidence, where
from dtobs.detectors.hangs.situation import Situation, Told
from dtobs.findings import Confidence, Finding
from dtobs.words import bytes_text, ranks_do


def find(situation: Situation, left: frozenset[int]) -> Told:
    """One finding for all ranks that the kernel killed."""
    killed = [e for e in situation.causes if e.process is not None and e.process.oom_killed and e.rank in left]
    if not killed:
        return Told()
    view, first = situation.view, killed[0]
    ranks = tuple(e.rank for e in killed)
    used = float(view.page(first.rank)["rss_bytes"])
    memory = f", last seen with {bytes_text(used)}" if used > 0 else ""
    return situation.told(
        [
            Finding(
                "rank-oom-killed",
                f"{ranks_do(ranks, 'were')} killed by the kernel for memory{memory}, {where(situation, first.rank)}",
                ranks,
                Confidence.CERTAIN,
                step=int(view.page(first.rank)["step"]),
                evidence=tuple(record for rank in ranks[:8] for record in stack_evidence(situation, rank)),
                since_ns=first.t_ns - int(view.page(first.rank)["clock_offset_ns"]),
            )
        ]
    )
