"""Were the dumps taken of a job that stood still? A dump of a moving job shows waiting ranks as well.

Two signs of motion: nothing has waited for long, by the file's time against the entry's, both of one host; and a rank
has completed a call that another had not yet issued when *its* dump was taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dtobs.calls.frontier import Frontier
from dtobs.flight_recorder.align import Aligned
from dtobs.flight_recorder.columns import COMPLETED, SCHEDULED, STARTED
from dtobs.flight_recorder.model import Dumps
from dtobs.words import duration_text, verb

MIN_WAIT_SECONDS = 5.0
MAX_USUAL_SECONDS = 60.0
USUAL_FACTOR = 3.0
MOVING_LAG = 2
"""A rank of a job in motion is this many calls behind its peers at most, where they do not run far ahead of it."""
BY_FILE_TIMES = (
    "that the job stood still rests on the times of the files: in a copy made without them (cp without -p, a download)"
    " a job in motion looks the same"
)
MOVING_SHARE = 0.25


def rests_on_file_times(dumps: Dumps, lag: int) -> bool:
    """Whether nothing but the files' times tells a rank that never joins from one that is `lag` calls behind."""
    return lag <= MOVING_LAG and any(dump.taken_ns is not None for dump in dumps.ranks)


@dataclass(frozen=True)
class Snapshot:
    """`moving` says why nothing may be concluded from waits, "" when it may; `stale`: rows of older dumps."""

    moving: str = ""
    stale: frozenset[int] = frozenset()


def judge(dumps: Dumps, aligned: Aligned, states: dict[int, Frontier]) -> Snapshot:
    """Look for signs of motion. Pure."""
    stale = _overtaken(dumps, aligned, states)
    waited = _longest_wait(dumps)
    moved = [row for row in stale if (dumps.row == row).any()]
    timed = any(dump.taken_ns is not None for dump in dumps.ranks)
    if len(stale) > MOVING_SHARE * len(dumps.ranks) or (moved and not timed):
        older = f"{len(stale)} of {len(dumps.ranks)} dumps {verb(len(stale), 'are')} older"
        text = f"{older} than what the other ranks had completed by then"
        return Snapshot(f"the dumps show a job in motion ({text}), so who waits in them proves nothing", stale)
    if waited is not None and waited < MAX_USUAL_SECONDS * USUAL_FACTOR and waited < _patience(dumps):
        text = f"nothing in them had waited longer than {duration_text(waited)} when they were taken"
        return Snapshot(f"the dumps show a job in motion ({text}), so who waits in them proves nothing", stale)
    return Snapshot("", stale)


def _overtaken(dumps: Dumps, aligned: Aligned, states: dict[int, Frontier]) -> frozenset[int]:
    """Rows of ranks that had not issued what others had completed, though nobody can complete it alone."""
    entries = dumps.entries
    alone = np.array([not op.synchronising for op in dumps.operations] or [True])
    # Gloo counts a failed call as done, so only a recorded completion proves something.
    done = (entries["state"][aligned.entry] == COMPLETED) & (entries["on_host"][aligned.entry] == 0)
    done &= ~alone[entries["signature"][aligned.entry]]
    reached = np.zeros(len(dumps.groups), np.int64)
    np.maximum.at(reached, aligned.group[done], aligned.seq[done])
    empty = np.bincount(dumps.row, minlength=len(dumps.ranks)) == 0  # a recorder that was off, or begun anew
    stale: set[int] = set()
    for group, state in states.items():
        behind = (state.issued < reached[group]) & ((state.last_entry >= 0) | empty[state.rows])
        stale |= set(map(int, state.rows[behind]))
    return frozenset(stale)


def _longest_wait(dumps: Dumps) -> float | None:
    """Seconds that the oldest uncompleted entry had waited when its dump was taken; None when nothing tells."""
    entries = dumps.entries
    waiting = np.flatnonzero((entries["state"] == SCHEDULED) | (entries["state"] == STARTED))
    taken = np.array([dump.taken_ns or 0 for dump in dumps.ranks] or [0], np.int64)[dumps.row[waiting]]
    created = entries["created_ns"][waiting]
    ages = (taken - created)[(taken > 0) & (created > 0) & (taken >= created)]
    return float(ages.max()) / 1e9 if len(ages) else None


def _patience(dumps: Dumps) -> float:
    """Seconds beyond which a wait is longer than what this job does between its calls."""
    created = dumps.entries["created_ns"]
    gaps = np.diff(created)[(np.diff(dumps.row) == 0) & (created[1:] > 0) & (created[:-1] > 0)]
    gaps = gaps[gaps > 0]
    usual = float(np.quantile(gaps, 0.999)) / 1e9 if len(gaps) >= 16 else 0.0
    return max(MIN_WAIT_SECONDS, USUAL_FACTOR * min(usual, MAX_USUAL_SECONDS))
