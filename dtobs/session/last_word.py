"""What a run's last line on the console says: what was found, what stood still, or that nothing was."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from dtobs.errors import DtobsError
from dtobs.findings import CATALOGUE, Trait
from dtobs.recording.journal import Entry, open_entries, read_journal
from dtobs.recording.rundir import RunDirectory
from dtobs.recording.summary import Summary, summarise
from dtobs.recording.view import RunView, load_run
from dtobs.recording.watched import last_pass, monitor_gone, monitor_lives
from dtobs.words import count, duration_text

_LEAST_BYTES = 1 << 16
_PATIENCE_SECONDS = 3.0
"""For the monitor's last pass: its own start takes a second or two, and a run of a few steps ends before."""
_POLL_SECONDS = 0.02


def await_last_pass(
    run: RunDirectory, node: int, attempt: int, since_ns: int, patience_seconds: float = _PATIENCE_SECONDS
) -> bool:
    """Wait a few seconds at most until the monitor has looked at the whole run; whether it has.

    `since_ns` (monotonic) tells this run from one that ended in the same directory before. True as well where there is
    nothing to wait for: the run directory was removed, or the monitor has ended.
    """
    deadline = time.monotonic() + patience_seconds
    while run.run_json.exists():
        last = last_pass(run, node)
        if last is not None and last.attempt == attempt and last.t_ns > since_ns and last.whole:
            return True
        if run.monitor_lock(node).exists() and not monitor_lives(run, node):
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def last_word(root: Path, attempt: int, steps: int, *, failed: bool, seen: bool = True) -> str:
    """What the run did with its time, and in a last line what its monitor has found.

    `seen`: whether the monitor has looked at all of it.
    """
    run = RunDirectory(root)
    if not run.run_json.exists():
        return f"the run directory {root} was removed while the run went on: nothing of it is left to look at"
    entries = read_journal(run.findings)
    view = _view(root)
    opened = open_entries(entries, attempt)
    came = [] if failed or view is None else [e for e in opened if _came(view, e)]
    found = list(dict.fromkeys(e.finding.code for e in opened if e not in came))
    over = [e for e in entries if e.event == "cleared" and CATALOGUE[e.finding.code].family == "hangs"]
    summary = _summary(view)
    stood = sum(e.lost_seconds for e in over) + sum(_stood(view, e) for e in came if view is not None)
    if view is not None and len(view.pages):
        steps = max(steps, int(view.pages["steps_done"].max()))  # rank 0 may take none of its own
    parts = []
    if found:
        parts.append(f"found {', '.join(found)}")
    if over or came:
        lost = max(stood, summary.losses["standing still"] if summary is not None else 0.0)
        parts.append(f"stood still for {duration_text(lost)}")
    if any(monitor_gone(run, node) for node in run.nodes()[:1]):
        parts.append("its monitor was killed, so that nobody looked for hangs and findings until the end")
    if _disk_is_full(root):
        parts.append("the disk of the run directory is full, so that what was found last may not have been written")
    if failed:
        parts.append("ended by an exception")
    if not seen and not parts:
        said = (
            f"nothing found so far in {count(steps, 'step')}, but the monitor has not looked at the end of the run yet:"
            f" dtobs diagnose {root}"
        )
    elif not parts:
        said = f"nothing found in {count(steps, 'step')}"
    else:
        said = f"{', '.join(parts)}; more with: dtobs diagnose {root}"
    spent = summary.lines() if summary is not None and summary.settled else []
    return "\ndtobs: ".join([*spent, said])


def _disk_is_full(root: Path) -> bool:
    try:
        return shutil.disk_usage(root).free < _LEAST_BYTES
    except OSError:
        return False


def _view(root: Path) -> RunView | None:
    try:
        return load_run(root, processes={}, with_capture=False)  # nobody's process need be looked at for it
    except DtobsError:  # the last line is worth more
        return None


def _came(view: RunView, entry: Entry) -> bool:
    """Whether a hang is over though its monitor has not said so yet: the last barrier may have been what took long."""
    passing = Trait.RECOVERABLE in entry.finding.traits and bool(entry.finding.ranks)
    return passing and view.came(entry.finding.ranks, entry.t_ns)


def _stood(view: RunView, entry: Entry) -> float:
    """Seconds from when others began to wait for the ranks of `entry` to when the last of them came."""
    came = max(int(view.page(rank)["collective_ns"]) for rank in entry.finding.ranks)
    return max(0, came - entry.finding.since_ns) / 1e9


def _summary(view: RunView | None) -> Summary | None:
    """What the run did with its time."""
    try:
        return summarise(view) if view is not None else None
    except DtobsError:
        return None
