"""``findings.jsonl``: what was found while the run lived, and what went away again.

One JSON object a line: ``{"event": "found" | "cleared", "utc", "t_ns", "attempt", "since_ns", **finding}``. The monitor
appends; a second "found" of the same matter replaces the first (more is known now). A cut last line is left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dtobs.findings import Finding

MAX_BYTES = 32 << 20


@dataclass(frozen=True)
class Entry:
    """One line of the journal."""

    event: Literal["found", "cleared"]
    utc: str
    t_ns: int  #: monotonic, of the host that wrote it
    attempt: int
    finding: Finding

    def to_json(self) -> dict[str, Any]:
        """The line as a dictionary; `from_json` reads it back."""
        return {
            "event": self.event,
            "utc": self.utc,
            "t_ns": self.t_ns,
            "attempt": self.attempt,
            "since_ns": self.finding.since_ns,
            **self.finding.to_json(),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Entry:
        """Raises KeyError, TypeError or ValueError when `value` is not a line of ours."""
        event = value["event"]
        if event not in ("found", "cleared"):
            raise ValueError(f"event {event!r}")
        return cls(
            event,
            str(value["utc"]),
            int(value.get("t_ns", 0)),
            int(value.get("attempt", 0)),
            Finding.from_json(value),
        )


def read_journal(path: Path) -> list[Entry]:
    """All lines in order; [] without a file. Lines that are not ours (cut, of a newer version) are left out."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES)
    except OSError:
        return []
    entries: list[Entry] = []
    for line in data.split(b"\n"):
        try:
            value = json.loads(line)
            if isinstance(value, dict):
                entries.append(Entry.from_json(value))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
    return entries


def open_entries(entries: list[Entry], attempt: int | None = None) -> list[Entry]:
    """The findings that were not cleared, each as last seen, oldest first; of one attempt, when it is given."""
    still: dict[tuple[str, tuple[int, ...], str | None], Entry] = {}
    for entry in entries:
        if attempt is not None and entry.attempt != attempt:
            continue
        if entry.event == "found":
            still[entry.finding.key] = entry
        else:
            still.pop(entry.finding.key, None)
    return list(still.values())
