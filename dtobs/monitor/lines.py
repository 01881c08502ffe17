"""Asks slow ranks at which lines of code they spend their time, and one peer each to compare them with."""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np

from dtobs.detectors.peers import data_groups
from dtobs.findings import Finding
from dtobs.recording.lines import MOST_SECONDS, ask_for_lines
from dtobs.recording.rundir import RunDirectory
from dtobs.recording.view import RunView

CODES = ("straggler", "data-starved")
MOST_RANKS, MOST_REQUESTS = 4, 8
STEPS = 8
"""So many steps the looks of one request are spread over, within the bounds of `dtobs.recording.lines`."""


class AskForLines:
    """Called after every pass of the detectors; asks once for each finding, and one request at a time."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._asked: set[tuple[object, ...]] = set()
        self._next = 0.0

    def consider(self, view: RunView, found: Iterable[Finding]) -> None:
        """Ask for what has not been asked for. Raises RecordingDisabled when the request cannot be written."""
        now = time.monotonic()
        if now < self._next or len(self._asked) >= MOST_REQUESTS:
            return
        finding = next((f for f in found if f.code in CODES and (view.attempt, *f.key) not in self._asked), None)
        if finding is None:
            return
        self._asked.add((view.attempt, *finding.key))
        slow = [rank for rank in finding.ranks if rank in view.ranks][:MOST_RANKS]
        peers = (_peer(group, finding.ranks) for group in data_groups(view) if not set(group).isdisjoint(slow))
        seconds = STEPS * float(np.median(view.pages["step_ns"])) / 1e9
        self._next = now + min(max(seconds, 0.0), MOST_SECONDS) + 5.0
        ask_for_lines(self._run, len(self._asked), [*slow, *(p for p in peers if p is not None)], seconds)


def _peer(group: Iterable[int], slow: Iterable[int]) -> int | None:
    """A rank of the same work that is not slow."""
    return next(iter(sorted(set(group) - set(slow))), None)
