"""``findings.jsonl``: what was found while the run lived, and what went away again.

One JSON object a line: ``{"event", "utc", "t_ns", "attempt", "since_ns", **finding}``, the event one of

* "found"; a second one of the same matter replaces the first (more is known now);
* "cleared", with ``until_ns``;
* "standing": what a standstill looked like before it was long enough for an alarm. The last of them says what the run
  stood in if somebody ended it then.

The monitor appends. A cut last line is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dtobs.codec import DecodeError, decode, parse
from dtobs.events import walls_ns
from dtobs.findings import Finding, Key, Trait

MAX_BYTES = 32 << 20
Event = Literal["found", "cleared", "standing"]


@dataclass(frozen=True)
class Entry:
    """One line of the journal."""

    event: Event
    utc: str
    t_ns: int  #: monotonic, of the host that wrote it
    attempt: int
    finding: Finding
    until_ns: int = 0  #: of a matter that was cleared: when it was last seen

    @property
    def lost_seconds(self) -> float:
        """How long a matter lasted, to when it was last seen; 0 when that is not known."""
        since = self.finding.since_ns
        return max(0.0, ((self.until_ns or self.t_ns) - since) / 1e9) if since else 0.0

    def to_json(self) -> dict[str, Any]:
        """The line as a dictionary; `read_journal` reads it back."""
        return {
            "event": self.event,
            "utc": self.utc,
            "t_ns": self.t_ns,
            "attempt": self.attempt,
            "since_ns": self.finding.since_ns,
            **({"until_ns": self.until_ns} if self.until_ns else {}),
            **self.finding.to_json(),
        }


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
            value = decode(dict[str, Any], parse(line))
            entries.append(decode(Entry, value | {"finding": value}))
        except DecodeError:
            continue
    return entries


def open_entries(entries: list[Entry], attempt: int | None = None) -> list[Entry]:
    """The findings that were not cleared or corrected, each as last seen, oldest first; of one attempt, if given."""
    still: dict[Key, Entry] = {}
    for entry in entries:
        if attempt is not None and entry.attempt != attempt:
            continue
        if entry.event == "found":
            still[entry.finding.key] = entry
        elif entry.event == "cleared":
            still.pop(entry.finding.key, None)
    return [e for e in still.values() if not any(_corrects(later.finding, e.finding) for later in still.values())]


def _corrects(later: Finding, earlier: Finding) -> bool:
    """Whether who ended by itself is known better by now: at first, all that one knows may be that all are gone."""
    return (
        later.code == earlier.code
        and Trait.ENDING in later.traits
        and later.confidence.order > earlier.confidence.order
        and set(later.ranks) < set(earlier.ranks)
    )


def standing_entries(entries: list[Entry], attempt: int | None = None) -> list[Entry]:
    """What the last standstill before an alarm looked like, when no alarm of the same matter followed."""
    mine = [e for e in entries if attempt is None or e.attempt == attempt]
    last = max((e.t_ns for e in mine if e.event == "standing"), default=0)
    later = {e.finding.key for e in mine if e.event != "standing" and e.t_ns >= last}
    return [e for e in mine if e.event == "standing" and e.t_ns == last and e.finding.key not in later]


def history(entries: list[Entry]) -> list[Entry]:
    """Every matter that was found and cleared, oldest first."""
    return [e for e in entries if e.event == "cleared"]


def hung_since(findings: Iterable[Finding]) -> list[int]:
    """The moments from which ranks waited for others in vain, monotonic nanoseconds."""
    return sorted({f.since_ns for f in findings if f.traits & Trait.HANG and f.since_ns})


def standing_share(
    steps: npt.NDArray[np.void], hung: Sequence[int], usual_ns: float | None = None
) -> npt.NDArray[np.float64]:
    """float64[steps]: the share of each step that a hang took: its time beyond that of a usual step.

    `hung` are moments within hangs (`hung_since`), `usual_ns` the length of a usual step; without it the median of
    these. A rank that was stopped in its backward records a long backward, and one that waited for it a long wait:
    neither says where time can be gained.
    """
    share, walls = np.zeros(len(steps)), walls_ns(steps)
    for since in hung:
        place = int(np.searchsorted(steps["end_ns"], since))
        if place == len(steps) or int(steps["begin_ns"][place]) > since:
            continue
        if usual_ns is None:
            usual_ns = float(np.median(walls))
        share[place] = max(0.0, 1 - usual_ns / int(walls[place]))
    return share
