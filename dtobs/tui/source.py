"""Where the screen's data comes from: a run directory or a monitor, looked at again and again."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path

from dtobs.detectors import hangs
from dtobs.diagnose.analyse import as_it_ended
from dtobs.errors import ServiceError, TargetError, UsageError, opening
from dtobs.nodes.remote import RunCopy, is_address
from dtobs.recording.journal import Entry, open_entries, read_journal
from dtobs.recording.profiling import ask
from dtobs.recording.rundir import RunDirectory
from dtobs.recording.view import RunView, load_run
from dtobs.timeline.whatif import RecentWhatIf
from dtobs.tui.detail import RankDetail, rank_detail
from dtobs.tui.model import ScreenFrame, build_frame, empty_frame


class Source(ABC):
    """What is looked at again and again: `look` gives the present frame."""

    _view: RunView | None = None
    _frame: ScreenFrame | None = None

    def __init__(self) -> None:
        self._simulate = RecentWhatIf()

    @abstractmethod
    def look(self) -> ScreenFrame:
        """The run as it is now. Raises DtobsError."""

    def detail(self, rank: int) -> RankDetail | None:
        """One rank as of the last look; None when it did not record."""
        if self._view is None or rank not in self._view.ranks:
            return None
        return rank_detail(self._view, rank)

    def profile(self, steps: int) -> str:
        """Ask the ranks for a profile; returns what to tell. Raises UsageError where nobody can be asked."""
        raise UsageError("a monitor cannot be asked for a profile: name the run directory, on its host")

    def _show(self, view: RunView, entries: list[Entry]) -> ScreenFrame:
        self._view = view
        if not len(view.pages):  # no monitor has begun: what is known of the rendezvous is looked at here
            entries = [Entry("found", "", view.now_ns, view.attempt, finding) for finding in hangs.detect(view)]
        still = open_entries(entries, view.attempt if len(view.pages) else None)
        current = [replace(entry, finding=as_it_ended(view, entry.finding)) for entry in still]
        cleared = (entry for entry in entries if entry.event == "cleared")
        self._frame = build_frame(view, current, cleared, self._simulate)
        return self._frame


class DirectorySource(Source):
    """Looks at a run directory. One that is not filled yet gives an empty frame, one that went away the last frame."""

    def __init__(self, root: Path, newest_below: Path | None = None) -> None:
        super().__init__()
        self.root, self._newest_below = root, newest_below

    def look(self) -> ScreenFrame:
        """The run as it is now; with `newest_below`, of a newer one there once this has ended.

        Raises TargetError when the path is something else than a run directory.
        """
        if self._newest_below is not None and self._frame is not None and self._frame.over:
            newest = newest_run(self._newest_below)
            if newest != self.root:
                self.root, self._view = newest, None
        try:
            with opening(self.root):
                view = load_run(self.root, previous=self._view)
        except TargetError:
            if self._frame is not None:
                return replace(self._frame, status="gone", status_text="its directory is gone")
            with opening(self.root):
                if self.root.is_dir() and not list(self.root.iterdir()):
                    return empty_frame(str(self.root), "empty", "no rank has recorded yet")
            raise
        return self._show(view, read_journal(RunDirectory(self.root).findings))

    def profile(self, steps: int) -> str:
        """Ask the ranks for a profile; returns what to tell. Raises UsageError where nobody can be asked."""
        request = ask(load_run(self.root, with_capture=False), steps)
        where = request.folder(RunDirectory(self.root))
        return f"steps {request.first} to {request.last} will be profiled: then dtobs trace {where}"


class MonitorSource(Source):
    """Asks a monitor. One that answered and does so no more leaves the last frame."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address, self._copy = address, RunCopy([address])

    def look(self) -> ScreenFrame:
        """The run as the monitor sees it. Raises ServiceError when it never answered."""
        try:
            view, (entries,) = self._copy.look()
        except ServiceError:
            if self._frame is None:
                raise
            over = self._frame.over  # a monitor leaves soon after the ranks of its node
            text = self._frame.status_text if over else "the monitor no longer answers"
            return replace(self._frame, status=self._frame.status if over else "gone", status_text=text)
        self._frame = replace(self._show(view, entries), target=self.address)
        return self._frame


def open_source(target: str | None, here: Path) -> Source:
    """The source for what a user typed; without anything the newest run below `here`. Raises TargetError."""
    if target is not None and is_address(target):
        return MonitorSource(target)
    return DirectorySource(newest_run(here), here) if target is None else DirectorySource(Path(target))


def newest_run(base: Path) -> Path:
    """The run below ``base/runs`` that was started last. Raises TargetError when there is none."""
    runs = base / "runs"
    with opening(runs):
        found = [p for p in runs.iterdir() if p.is_dir() and _is_run(p)] if runs.is_dir() else []
        closed = (
            [] if found or not runs.is_dir() else [p for p in runs.iterdir() if not os.access(p, os.R_OK | os.X_OK)]
        )
    if closed:
        raise TargetError(f"you may not read {closed[0]}: run this as its owner, or name another run directory")
    if not found:
        raise TargetError(f"there is no run below {runs}: name a run directory, or start one (make train)")
    return max(found, key=lambda p: (_started_ns(p), p.name))


def _started_ns(run: Path) -> int:
    """When rank 0 wrote run.json; a folder's own time changes with every file that is put into it."""
    said = run / "run.json"
    return (said if said.exists() else run).stat().st_mtime_ns


def _is_run(path: Path) -> bool:
    try:
        return (path / "run.json").exists() or (path / "nodes").is_dir()
    except PermissionError:  # another user's
        return False
