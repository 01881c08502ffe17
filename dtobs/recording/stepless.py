"""Ranks that take part in the calls of others and take no steps of their own: a parameter server, an actor."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from dtobs.events import Phase

if TYPE_CHECKING:
    from dtobs.recording.view import RunView

FIRST_STEPS = 3
"""Where a rank has done so many, one that has done none is not in its first."""
_HISTORY = 64


def stepless(view: RunView) -> frozenset[int]:
    """Ranks that have done no step and still did something after another rank had done several.

    A rank that still starts (it downloads, it compiles) publishes nothing meanwhile; one that others call does.
    """
    if "stepless" not in view.shared:
        view.shared["stepless"] = _find(view)
    return cast(frozenset[int], view.shared["stepless"])


def _find(view: RunView) -> frozenset[int]:
    pages = view.pages
    idle = pages[(pages["steps_done"] == 0) & (pages["phase"] != Phase.COMPILE)]
    if not len(idle) or pages["steps_done"].max() < FIRST_STEPS:
        return frozenset()
    steps = view.recent_steps(int(pages["rank"][pages["steps_done"].argmax()]), _HISTORY)
    if len(steps) < FIRST_STEPS:
        return frozenset()
    last_ns = np.maximum(idle["heartbeat_ns"], idle["collective_ns"])
    takes_part = last_ns > steps["end_ns"][FIRST_STEPS - 1]
    return frozenset(idle["rank"][takes_part].tolist())
