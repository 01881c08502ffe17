"""``reduce-op-mismatch``: ranks reduce with different operations (sum here, average or maximum there).

Why it hurts: no backend notices. The job goes on, with results that differ from rank to rank. Only a record of the
operation per sequence number shows it.

What to do next: use one ReduceOp on all ranks at the line shown.
"""

from __future__ import annotations

from dtobs.detectors.hangs.disagree import disagreements
from dtobs.detectors.hangs.situation import Situation
from dtobs.findings import Finding


def find(situation: Situation) -> list[Finding]:
    """The first such call of each group."""
    return disagreements(situation, "reduce-op-mismatch", "different reductions")
