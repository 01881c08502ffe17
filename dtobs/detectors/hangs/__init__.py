"""Hangs and crashes: which rank is the cause, where it is, and why. Ranks that merely wait are never accused.

All rules start from one interpretation of the run (`situation`): who ended and how, who is blocked on whom, who is
missing. Hangs need a stall (`stall`); crashes and disagreements do not.
"""

from __future__ import annotations

from collections.abc import Callable

from dtobs.detectors.base import Detector
from dtobs.detectors.hangs import (
    call_site_mismatch,
    collective_mismatch,
    dtype_mismatch,
    gil_held,
    group_deadlock,
    network_stalled,
    rank_dead,
    rank_exited_early,
    rank_not_joined,
    rank_oom_killed,
    rank_stopped,
    reduce_op_mismatch,
    shape_mismatch,
    stuck_in_checkpoint,
    stuck_in_dataloader,
    uncaught_exception,
)
from dtobs.detectors.hangs.situation import Situation, interpret
from dtobs.findings import Finding
from dtobs.recording.view import RunView

RULES: tuple[Callable[[Situation], list[Finding]], ...] = (
    collective_mismatch.find,
    shape_mismatch.find,
    dtype_mismatch.find,
    reduce_op_mismatch.find,
    call_site_mismatch.find,
    uncaught_exception.find,
    rank_oom_killed.find,
    rank_dead.find,
    rank_exited_early.find,
    rank_stopped.find,
    gil_held.find,
    stuck_in_dataloader.find,
    stuck_in_checkpoint.find,
    rank_not_joined.find,
    group_deadlock.find,
    network_stalled.find,
)


def detect(view: RunView) -> list[Finding]:
    """All findings of the family."""
    if not len(view.pages):
        return []
    situation = interpret(view)
    return [finding for rule in RULES for finding in rule(situation)]


DETECTORS: tuple[Detector, ...] = (detect,)
