"""``shape-mismatch``: ranks call the same collective with different numbers of elements.

Why it hurts: Gloo aborts, often an innocent rank; NCCL hangs or overwrites memory. The evidence is certain: the same
group and sequence number, another number of elements.

What to do next: print the tensor's shape at the line shown; usually a last batch of another size, or padding that
depends on the rank.
"""

from __future__ import annotations

from dtobs.detectors.hangs.disagree import disagreements
from dtobs.detectors.hangs.situation import Situation
from dtobs.findings import Finding


def find(situation: Situation) -> list[Finding]:
    """The first such call of each group."""
    return disagreements(situation, "shape-mismatch", "different sizes")
