"""When to gather evidence of a stall: once when it begins, again when the picture has changed, never without end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dtobs.detectors.hangs.stall import Stall, quiet_period
from dtobs.errors import RecordingDisabled
from dtobs.monitor.capture import capture_ranks, make_room
from dtobs.recording.capture import Capture
from dtobs.recording.view import RunView
from dtobs.words import duration_text, ranks_text

KEEP = 10
_MAX_PER_STALL = 4
_MAX_EARLY = 8
_APART_SECONDS = 5.0
_REFRESH_SECONDS = 60.0
"""A stack that shows a compilation excuses a silence; after this long it has to show it again."""

Picture = tuple[tuple[object, ...], ...]


@dataclass
class Watchdog:
    """Holds the state of one stall; `folder` is RUN_DIR/captures."""

    folder: Path
    take: Callable[..., Capture] = capture_ranks
    stalled: Stall | None = None
    standing: Stall | None = None  #: a standstill that is no alarm yet, looked at for who may ask, or end the job
    apart: Stall | None = None  #: of a part of the ranks, while others go on
    capture: Capture | None = None  #: of the present stall
    captures: int = 0  #: taken by this monitor
    early: int = 0  #: of them, taken of a standstill before it was long enough for an alarm
    problems: list[str] = field(default_factory=list)  #: what went wrong, one line each; the owner empties it
    _picture: Picture = ()
    _taken_s: float = 0.0
    _in_stall: int = 0
    _patience: float = 1.0

    def look(self, view: RunView) -> float:
        """Judge `view`, capturing when that is due; returns how much of the threshold has passed (0 … 1 and more)."""
        quiet = quiet_period(view)
        if quiet is None or not quiet.exceeded:
            self.stalled = None
            self._in_stall = 0
            if quiet is None or quiet.seconds < 1.0:
                if self.standing is not None:
                    self._patience *= 2.0  # it went on by itself: this run takes such pauses
                self.standing = None
                self.capture = self.capture if self.apart is not None else None
            elif self._stands(quiet):
                self.standing = quiet
                self._capture(view, quiet, _picture(view))
            elif self._excuses(quiet):
                self._capture(view, quiet, _picture(view))
            return 0.0 if quiet is None else quiet.seconds / max(quiet.threshold_seconds, 1e-9)
        picture = _picture(view)
        begins = self.stalled is None
        self.stalled, self.standing = quiet, None
        apart = time.monotonic() - self._taken_s >= _APART_SECONDS
        if begins or (picture != self._picture and apart and self._in_stall < _MAX_PER_STALL):
            self._capture(view, quiet, picture)
        return quiet.seconds / max(quiet.threshold_seconds, 1e-9)

    def look_apart(self, view: RunView | None) -> None:
        """Capture, once, the ranks of `view`, which stand still while others go on; None where there are none."""
        began = None if view is None else quiet_period(view)
        before, self.apart = self.apart, began
        if view is None or began is None:
            self.capture = None if before is not None and self.stalled is None else self.capture
        elif before is None or before.ranks != began.ranks or before.since_ns != began.since_ns:
            self._capture(view, began, _picture(view), who=f"{ranks_text(began.ranks)}, while others go on: ")

    def _stands(self, quiet: Stall) -> bool:
        """Whether a standstill deserves its one early look; the looks of a run are few."""
        if self.standing is not None or self.early >= _MAX_EARLY or not quiet.standing:
            return False
        if quiet.seconds <= self._patience * quiet.early_seconds:
            return False
        self.early += 1
        return True

    def _excuses(self, quiet: Stall) -> bool:
        """Whether what the capture of this very silence showed is all that makes it no stall, and is old by now."""
        shown = self.capture is not None and self.capture.taken_ns >= quiet.since_ns
        limited = quiet.threshold_seconds < float("inf")
        return shown and limited and time.monotonic() - self._taken_s >= _REFRESH_SECONDS

    def _capture(self, view: RunView, stalled: Stall, picture: Picture, who: str = "") -> None:
        reason = (
            f"{who}nothing has moved for {duration_text(stalled.seconds)}; "
            f"the limit is {duration_text(stalled.threshold_seconds)}: {stalled.why}"
        )
        capture = self.take(view, reason, previous=self.capture)
        self.capture, self._picture = capture, picture
        self._taken_s = time.monotonic()
        self.captures += 1
        self._in_stall += 1
        make_room(self.folder, KEEP)
        try:
            capture.save(self.folder / capture.taken_utc)
        except (RecordingDisabled, OSError) as error:
            self.problems.append(f"the capture is kept in memory only: {error}")


def _picture(view: RunView) -> Picture:
    """What must change for a second capture to be worth it."""
    rows = []
    for page, rank in zip(view.pages, view.ranks, strict=True):
        process = view.process(rank)
        rows.append(
            (
                rank,
                int(page["phase"]),
                int(page["collective_seq"]),
                int(page["state"]),
                process is not None and process.alive,
                process is not None and process.stopped,
            )
        )
    return tuple(rows)
