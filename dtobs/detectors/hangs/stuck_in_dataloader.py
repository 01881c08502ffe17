"""``stuck-in-dataloader``: a rank waits for its next batch while its peers wait for the rank.

Why it hurts: the whole job waits for one loader, and the error, when it comes, is a communication timeout on every
*other* rank. The evidence is the phase the rank is in, or a frame of torch.utils.data in its stack.

What to do next: check the storage and the loader's workers on this rank's host; give the DataLoader a ``timeout``.
"""

from __future__ import annotations

from dtobs.detectors.hangs.phase import stuck_in
from dtobs.detectors.hangs.situation import Situation
from dtobs.findings import Finding


def find(situation: Situation) -> list[Finding]:
    """One finding for each collective that ranks are missing in because of their data."""
    return stuck_in(situation, "stuck-in-dataloader", "data", lambda has, taken: f"{has} waited {taken} for data")
