"""``dtype-mismatch``: ranks call the same collective with different element types.

Why it hurts: bytes of one type are read as another: a crash where the sizes differ, silent nonsense where they do not
(float16 against bfloat16). The evidence is certain: the same group and sequence number, another type.

What to do next: cast to one type before the call; look for autocast or a buffer created on some ranks only.
"""

from __future__ import annotations

from dtobs.detectors.hangs.disagree import disagreements
from dtobs.detectors.hangs.situation import Situation
from dtobs.findings import Finding


def find(situation: Situation) -> list[Finding]:
    """The first such call of each group."""
    return disagreements(situation, "dtype-mismatch", "different element types")
