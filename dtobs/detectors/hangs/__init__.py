"""Hangs and crashes: which rank is the cause, where it is, and why. Ranks that merely wait are never accused.

All rules start from one interpretation of the run (`situation`): who ended and how, who is blocked on whom, who is
missing. Hangs need a stall (`stall`); crashes and disagreements do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dtobs.detectors.base import Detector
from dtobs.detectors.hangs import (
    device_stopped,
    disagree,
    gil_held,
    group_deadlock,
    groups,
    lost_nodes,
    network_stalled,
    no_progress,
    p2p_unmatched,
    rank_dead,
    rank_exited_early,
    rank_not_joined,
    rank_oom_killed,
    rank_stopped,
    rendezvous_failed,
    rendezvous_incomplete,
    stuck_in_phase,
    uncaught_exception,
    unused_parameters,
)
from dtobs.detectors.hangs.apart import standing_apart
from dtobs.detectors.hangs.endings import End
from dtobs.detectors.hangs.situation import Situation, Told, interpret
from dtobs.findings import Confidence, Finding, Trait
from dtobs.recording.view import RunView

RULES: tuple[Callable[[Situation, frozenset[int]], Told], ...] = (
    unused_parameters.find,
    rank_stopped.find,
    gil_held.find,
    stuck_in_phase.find,
    disagree.find,
    uncaught_exception.find,
    rank_oom_killed.find,
    rank_dead.find,
    rank_exited_early.find,
    rank_not_joined.find,
    p2p_unmatched.find,
    rank_not_joined.gone_past,
    group_deadlock.find,
    device_stopped.find,
    rank_not_joined.unrecorded,
    network_stalled.find,
    uncaught_exception.unexplained,
    rank_dead.aborted,
    no_progress.find,
)
"""In the order in which they explain: what says why a rank does not move comes before what only sees that it does not.

Each is given the ranks that the ones before it have not accounted for, and says which it accounts for itself.
"""


def explain(situation: Situation) -> list[Finding]:
    """The findings of all rules, each on what is left."""
    found: list[Finding] = []
    left = frozenset(situation.view.ranks)
    for rule in RULES:
        told = rule(situation, left)
        found += told.findings
        left -= told.ranks
    return found


def detect(view: RunView) -> list[Finding]:
    """All findings of the family."""
    missing = rendezvous_incomplete.find(view)
    failed = rendezvous_failed.find(view, bool(missing))
    if not len(view.pages):
        return failed or missing
    return [*failed, *_of_recorded(view, [] if failed else missing)]


def _of_recorded(view: RunView, missing: list[Finding]) -> list[Finding]:
    lost = lost_nodes.lost_nodes(view)
    seen = view.without([rank for contact in lost.values() for rank in contact.ranks]) if lost else view
    situation = interpret(seen)
    if missing and not situation.causes:
        return missing  # nothing else can have happened yet
    if constructing := groups.find(situation):
        return constructing  # who waits inside a construction has not reached what comes after it
    found = explain(situation) if len(seen.pages) else []
    if situation.early:
        found = [_early(finding) for finding in found if finding.code != "network-stalled"]
    if any(finding.confidence is not Confidence.POSSIBLE for finding in found):
        return found
    if apart := standing_apart(situation):
        return explain(interpret(apart))
    return lost_nodes.find(situation, lost, view) or found


def _early(finding: Finding) -> Finding:
    """What a rule says of a standstill that is no alarm yet: never certain, and no guess at all at the network."""
    if Trait.ENDING in finding.traits and not any(r.get("how") == End.CLOSED.value for r in finding.evidence):
        return finding  # a process that is gone does not come back
    sure = Trait.SEEN in finding.traits and finding.confidence is not Confidence.POSSIBLE
    return replace(finding, early=True, confidence=Confidence.LIKELY if sure else Confidence.POSSIBLE)


DETECTORS: tuple[Detector, ...] = (detect,)
