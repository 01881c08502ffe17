"""What a run's last line on the console says: what was found, what stood still, or that nothing was."""

from __future__ import annotations

from pathlib import Path

from dtobs.errors import DtobsError
from dtobs.findings import CATALOGUE
from dtobs.recording.journal import open_entries, read_journal
from dtobs.recording.rundir import RunDirectory
from dtobs.recording.summary import summarise
from dtobs.recording.view import load_run
from dtobs.recording.watched import monitor_gone
from dtobs.words import count, duration_text


def last_word(root: Path, attempt: int, steps: int, *, failed: bool) -> str:
    """What the run did with its time, and in a last line what its monitor has found so far."""
    run = RunDirectory(root)
    if not run.run_json.exists():
        return f"the run directory {root} was removed while the run went on: nothing of it is left to look at"
    entries = read_journal(run.findings)
    found = list(dict.fromkeys(e.finding.code for e in open_entries(entries, attempt)))
    over = [e for e in entries if e.event == "cleared" and CATALOGUE[e.finding.code].family == "hangs"]
    spent = _spent(root)
    parts = []
    if found:
        parts.append(f"found {', '.join(found)}")
    if over:
        parts.append(f"stood still for {duration_text(sum(e.lost_seconds for e in over))}")
    if any(monitor_gone(run, node) for node in run.nodes()[:1]):
        parts.append("its monitor was killed, so that nobody looked for hangs and findings until the end")
    if failed:
        parts.append("ended by an exception")
    if not parts:
        said = f"nothing found in {count(steps, 'step')}"
    else:
        said = f"{', '.join(parts)}; more with: dtobs diagnose {root}"
    return "\ndtobs: ".join([*spent, said])


def _spent(root: Path) -> list[str]:
    """What the run did with its time, where it was long enough to say."""
    try:
        # Nobody's process need be looked at for it.
        summary = summarise(load_run(root, processes={}, with_capture=False))
    except DtobsError:  # the last line is worth more
        return []
    return summary.lines() if summary is not None and summary.settled else []
