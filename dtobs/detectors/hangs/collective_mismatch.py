"""``collective-mismatch``: ranks call different collectives at the same place of a group's sequence.

Why it hurts: backends match calls by order alone. Different operations meet: the job hangs, crashes on an innocent
rank, or goes on with wrong numbers. The evidence is certain: the same group and sequence number, another operation or
another root.

What to do next: make the order of collectives equal on all ranks; look for a branch that depends on rank or data.
"""

from __future__ import annotations

from dtobs.detectors.hangs.disagree import disagreements
from dtobs.detectors.hangs.situation import Situation
from dtobs.findings import Finding


def find(situation: Situation) -> list[Finding]:
    """The first such call of each group."""
    return disagreements(situation, "collective-mismatch", "different collectives")
