"""torchrun's table of failed ranks: the exit code and traceback of each. Its "root cause" is the first by the clock."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from dtobs.logs.traces import START, Raised, Trace

_MAX_LINES = 20_000
_ENTRY = re.compile(r"\s{0,4}\[\d{1,7}\]:\s{0,4}$")
_FIELD = re.compile(r"\s{1,6}(time|host|rank|exitcode|error_file|traceback)\s{0,8}: ?(.{0,2000})")
_TORN = re.compile(r"\s{1,6}rank\s{1,8}: \d{1,7} \(local_rank: \d{1,7}\)\s{0,4}$")
_IN_ONE_LINE = re.compile(
    r"\s{0,6}(?:\[\d{1,7}\]:)?\s{0,8}time\s{0,8}: (?P<time>\S{1,40})\s{1,8}host\s{0,8}: (?P<host>\S{1,200})\s{1,8}"
    r"rank\s{0,8}: (?P<rank>\d{1,7} \(local_rank: \d{1,7}\))\s{1,8}"
    r"exitcode\s{0,8}: (?P<exitcode>-?\d{1,6} \(pid: \d{1,9}\))"
)
"""An entry of which a collector made one line."""
_RANK = re.compile(r"(\d{1,7}) \(local_rank: (\d{1,7})\)")
_EXIT = re.compile(r"(-?\d{1,6}) \(pid: (\d{1,9})\)")
_ENDED_BY_TORCHRUN = (-9, -15)
_LATER_SECONDS = 5.0
"""torchrun sees within a second what fails, and kills after half a minute what does not heed its SIGTERM."""


@dataclass(frozen=True, slots=True)
class Failed:
    """One failed rank of the table."""

    rank: int | None = None
    host: str = ""
    at: datetime | None = None  #: when torchrun saw it end, by its host's clock
    exit_code: int | None = None
    pid: int | None = None
    message: str = ""  #: of the `traceback` row, where it is no traceback
    raised: Raised | None = None
    where: str = ""
    order: int = 0
    file: int = 0


def begins_table(text: str) -> bool:
    """Whether a table begins with this line, or goes on with it where its head is torn off."""
    heading = text.startswith(("Failures:", "Root Cause (first observed failure)"))
    return heading or _TORN.match(text) is not None or _IN_ONE_LINE.match(text) is not None


class FailureTable:
    """Reads a table from its first heading to its last rule."""

    def __init__(self) -> None:
        self.entries: list[Failed] = []
        self._lines = 0
        self._trace: Trace | None = None

    def feed(self, text: str) -> bool | None:
        """Take a line; False when it ends the table, None when it is none of it."""
        self._lines += 1
        if text.startswith("====="):
            return False
        if text.startswith("-----"):
            self._trace = None
            return True
        if "Root Cause" in text or text.startswith("Failures:"):
            self._trace = None
            return True
        if whole := _IN_ONE_LINE.match(text):
            self._trace = None
            self.entries.append(Failed())
            for name, value in whole.groupdict().items():
                self._field(name, value)
            return True
        if _ENTRY.match(text):
            self._trace = None
            self.entries.append(Failed())
            return True
        if self._trace is not None and self._lines <= _MAX_LINES:
            self._traced(text)
            return True
        field = _FIELD.match(text)
        if field is not None:
            self.entries = self.entries or [Failed()]
            self._field(field[1], field[2].strip())
        return True if self._lines <= _MAX_LINES and (not text.strip() or text[0] in " \t<") else None

    def _field(self, name: str, value: str) -> None:
        entry = self.entries[-1]
        if name == "time":
            with suppress(ValueError):
                entry = replace(entry, at=datetime.strptime(value, "%Y-%m-%d_%H:%M:%S").replace(tzinfo=UTC))
        elif name == "host":
            entry = replace(entry, host=value)
        elif name == "rank" and (found := _RANK.match(value)):
            entry = replace(entry, rank=int(found[1]))
        elif name == "exitcode" and (found := _EXIT.match(value)):
            entry = replace(entry, exit_code=int(found[1]), pid=int(found[2]))
        elif name == "traceback" and START in value:
            self._trace = Trace()
        elif name == "traceback":
            entry = replace(entry, message=value)
        self.entries[-1] = entry

    def _traced(self, text: str) -> None:
        assert self._trace is not None
        result = self._trace.feed(text[2:] if text.startswith("  ") else text)
        if isinstance(result, Raised):
            self.entries[-1] = replace(self.entries[-1], raised=result)
            self._trace = None


def ended_by_torchrun(failures: Iterable[Failed]) -> set[int]:
    """The processes that torchrun killed after another one of the same table had failed of itself."""
    tables: dict[tuple[int, int], list[Failed]] = {}
    for failed in failures:
        tables.setdefault((failed.file, failed.order), []).append(failed)
    found: set[int] = set()
    for table in tables.values():
        ended = [(f.at, f.pid) for f in table if f.at and f.pid and f.exit_code in _ENDED_BY_TORCHRUN]
        first = min((f.at for f in table if f.at and f.exit_code not in _ENDED_BY_TORCHRUN), default=None)
        found |= {pid for at, pid in ended if first and (at - first).total_seconds() > _LATER_SECONDS}
    return found
