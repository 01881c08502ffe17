"""What a run's last line on the console says: what was found, what stood still, or that nothing was."""

from __future__ import annotations

from pathlib import Path

from dtobs.findings import CATALOGUE
from dtobs.recording.journal import open_entries, read_journal
from dtobs.recording.rundir import RunDirectory
from dtobs.words import count, duration_text


def last_word(root: Path, attempt: int, steps: int, *, failed: bool) -> str:
    """One line about the run, by what its monitor wrote down so far."""
    entries = read_journal(RunDirectory(root).findings)
    found = list(dict.fromkeys(e.finding.code for e in open_entries(entries, attempt)))
    over = [e for e in entries if e.event == "cleared" and CATALOGUE[e.finding.code].family == "hangs"]
    parts = []
    if found:
        parts.append(f"found {', '.join(found)}")
    if over:
        parts.append(f"stood still for {duration_text(sum(e.lost_seconds for e in over))}")
    if failed:
        parts.append("ended by an exception")
    if not parts:
        return f"nothing found in {count(steps, 'step')}"
    return f"{', '.join(parts)}; more with: dtobs diagnose {root}"
