"""Ranks that stand still while others go on: a group of its own whose members wait for one that does nothing.

A standstill of the whole run is `stall`; here the run moves. The ranks that stand still are looked at as a run of their
own, and judged as one: only those that wait for each other, so that nobody who waits for a rank at work is among them
(a logger, an evaluator, a parameter server), and only beyond what a whole run may take.
"""

from __future__ import annotations

from dataclasses import replace

from dtobs.detectors.hangs.situation import Situation
from dtobs.detectors.hangs.stall import silent_ranks, stall
from dtobs.recording.view import RunView


def standing_apart(situation: Situation) -> RunView | None:
    """The view of those that stand still and of nobody else; None where there is nobody, or the whole run does."""
    view = situation.view
    if situation.broken or situation.stall is not None:
        return None
    still = silent_ranks(view)
    if not still or len(still) == len(view.ranks):
        return None
    waits = {rank: set(situation.awaited(rank)) for rank in still & situation.blocked.keys()}
    while gone := [rank for rank, awaited in waits.items() if not awaited or not awaited <= still]:
        still -= set(gone)
        for rank in gone:
            del waits[rank]
    if not waits:
        return None
    among = waits.keys() | set().union(*waits.values())
    seen = replace(view.without(set(view.ranks) - among), asked=False)
    return seen if stall(seen) is not None else None
