"""Keeps findings.jsonl: each matter once when it is found, once when it is gone; nothing is lost to a full disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from dtobs.codec import encode
from dtobs.findings import Confidence, Finding, Key
from dtobs.monitor.exits import write_out
from dtobs.recording.journal import Entry, Event, open_entries, read_journal

_MISSES_TO_CLEAR = 2
_MAX_UNWRITTEN = 2000


@dataclass
class _Open:
    finding: Finding
    misses: int = 0
    found_ns: int = 0
    seen_ns: int = 0


class Journal:
    """Findings that are open now, and their history on disk.

    A monitor that takes over continues where the last one ended. With ``writes=False`` it only remembers.
    """

    def __init__(self, path: Path, attempt: int = 0, *, writes: bool = True) -> None:
        self._path, self._writes = path, writes
        self.attempt = attempt
        self.unwritten: list[str] = []
        self.dropped = 0  #: lines that did not fit into memory while the disk was full
        self._open: dict[Key, _Open] = {
            e.finding.key: _Open(e.finding, 0, e.t_ns, e.t_ns) for e in open_entries(read_journal(path), attempt)
        }
        self._standing: frozenset[tuple[Key, Confidence]] = frozenset()

    @property
    def findings(self) -> list[Finding]:
        """What is wrong now, in the order found."""
        return [o.finding for o in self._open.values()]

    def update(
        self,
        found: Iterable[Finding],
        now_ns: int,
        *,
        may_clear: bool,
        over: Callable[[Finding, int], bool] = lambda finding, found_ns: True,
        done: Callable[[Finding, int], bool] = lambda finding, found_ns: False,
        until: Callable[[Finding], int] = lambda finding: 0,
    ) -> list[Entry]:
        """Take the findings of one pass of the detectors; returns what is new.

        A finding is cleared when two passes in a row do not have it and `may_clear`: a run that is ending takes the
        signs of its faults with it, which does not make it healthy. ``over(finding, found_ns)`` may object, and
        ``done(finding, found_ns)`` says of one that a single pass does not have that it certainly is over.
        ``until(finding)`` says until when one lasted that is over, 0 when it is not known better than from the passes.
        """
        changes: list[Entry] = []
        seen: set[Key] = set()
        for finding in found:
            seen.add(finding.key)
            known = self._open.get(finding.key)
            since = finding.since_ns or now_ns
            if known is None:
                self._open[finding.key] = _Open(replace(finding, since_ns=since), 0, now_ns, now_ns)
            elif _says_more(finding, known.finding):
                known.finding, known.misses = replace(finding, since_ns=known.finding.since_ns), 0
            else:
                known.misses, known.seen_ns = 0, now_ns
                continue
            self._open[finding.key].seen_ns = now_ns
            changes.append(self._entry("found", self._open[finding.key].finding, now_ns))
        for key in [k for k in self._open if k not in seen]:
            gone = self._open[key]
            gone.misses += 1
            cleared = may_clear and gone.misses >= _MISSES_TO_CLEAR and over(gone.finding, gone.found_ns)
            if cleared or done(gone.finding, gone.found_ns):
                lasted = max(gone.seen_ns, min(until(gone.finding), now_ns))
                changes.append(self._entry("cleared", gone.finding, now_ns, lasted))
                del self._open[key]
        self._write(changes)
        return changes

    def standing(self, found: Iterable[Finding], now_ns: int) -> list[Entry]:
        """Write down what a standstill looks like before it is an alarm, once for each picture of it."""
        seen = list(found)
        picture = frozenset((f.key, f.confidence) for f in seen)
        if picture == self._standing:
            return []
        self._standing = picture
        entries = [self._entry("standing", finding, now_ns) for finding in seen]
        self._write(entries)
        return entries

    def restart(self, attempt: int, now_ns: int) -> list[Entry]:
        """A new attempt has begun: what was wrong with the last one is history."""
        changes = [self._entry("cleared", o.finding, now_ns, o.seen_ns or now_ns) for o in self._open.values()]
        self._open.clear()
        self.attempt = attempt
        self._write(changes)
        return changes

    def lead(self, told: Iterable[Finding], now_ns: int, *, writes: bool) -> list[Entry]:
        """Begin or cease to keep the journal of the run.

        On becoming leader, continue this file's open findings and those that the previous leader `told`. On losing it,
        close all: the run's findings are another's from now on.
        """
        if not writes:
            changes = self.restart(self.attempt, now_ns)
            self._writes = False
            return changes
        self._writes = True
        entries = open_entries(read_journal(self._path), self.attempt)
        self._open = {e.finding.key: _Open(e.finding, 0, e.t_ns, e.t_ns) for e in entries}
        changes = []
        for finding in told:
            if finding.key not in self._open:
                self._open[finding.key] = _Open(finding, 0, now_ns, now_ns)
                changes.append(self._entry("found", finding, now_ns))
        self._write(changes)
        return changes

    def flush(self) -> bool:
        """Write what the disk refused before; False when it still does."""
        return write_out(self._path, self.unwritten)

    def _entry(self, event: Event, finding: Finding, now_ns: int, until_ns: int = 0) -> Entry:
        utc = datetime.now(UTC).isoformat(timespec="milliseconds")
        return Entry(event, utc, now_ns, self.attempt, finding, until_ns)

    def _write(self, changes: list[Entry]) -> None:
        if not self._writes:
            return
        self.unwritten += [encode(e.to_json()) + "\n" for e in changes]
        excess = len(self.unwritten) - _MAX_UNWRITTEN
        if excess > 0:
            del self.unwritten[:excess]
            self.dropped += excess
        self.flush()


def _says_more(new: Finding, old: Finding) -> bool:
    """Whether a matter seen again is worth another line: it became surer, has a line of code, or twice the evidence.

    Evidence often grows with every step; doubling keeps the journal short.
    """
    if old.early and not new.early:
        return True
    if new.confidence.order != old.confidence.order:
        return new.confidence.order > old.confidence.order
    if _has_line(new) and not _has_line(old):
        return True
    return len(new.evidence) >= 2 * max(1, len(old.evidence)) or (not old.evidence and bool(new.evidence))


def _has_line(finding: Finding) -> bool:
    return any(record["what"] == "line" for record in finding.evidence)
