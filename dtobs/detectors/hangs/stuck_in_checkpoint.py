"""``stuck-in-checkpoint``: a rank does not come back from writing or reading a checkpoint.

Why it hurts: storage that hangs (a full quota, a lost mount) looks like a communication timeout on the other ranks.
The evidence is the phase the rank is in, or a frame of the checkpoint code in its stack. A checkpoint may take eight
times the hang timeout, or what the program declared, before it counts.

What to do next: write a small file to the checkpoint storage from this rank's host, and time it.
"""

from __future__ import annotations

from dtobs.detectors.hangs.phase import stuck_in
from dtobs.detectors.hangs.situation import Situation
from dtobs.findings import Finding


def find(situation: Situation) -> list[Finding]:
    """One finding for each collective that ranks are missing in because of a checkpoint."""
    return stuck_in(
        situation,
        "stuck-in-checkpoint",
        "checkpoint",
        lambda has, taken: f"{has} been in a checkpoint for {taken}",
    )
