"""torchrun's table of failed ranks: the exit code and traceback of each. Its "root cause" is the first by the clock."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from dtobs.logs.traces import START, Raised, Trace

_MAX_LINES = 20_000
_ENTRY = re.compile(r"\s{0,4}\[\d{1,7}\]:\s{0,4}$")
_FIELD = re.compile(r"\s{1,6}(time|host|rank|exitcode|error_file|traceback)\s{0,8}: ?(.{0,2000})")
_RANK = re.compile(r"(\d{1,7}) \(local_rank: (\d{1,7})\)")
_EXIT = re.compile(r"(-?\d{1,6}) \(pid: (\d{1,9})\)")


@dataclass(frozen=True, slots=True)
class Failed:
    """One failed rank of the table."""

    rank: int | None = None
    host: str = ""
    exit_code: int | None = None
    pid: int | None = None
    message: str = ""  #: of the `traceback` row, where it is no traceback
    raised: Raised | None = None
    where: str = ""
    order: int = 0
    file: int = 0


class FailureTable:
    """Reads a table from its first heading to its last rule."""

    def __init__(self) -> None:
        self.entries: list[Failed] = []
        self._lines = 0
        self._trace: Trace | None = None

    def feed(self, text: str) -> bool:
        """Take a line; False when the table is over."""
        self._lines += 1
        if self._lines > _MAX_LINES or text.startswith("====="):
            return False
        if text.startswith("-----"):
            self._trace = None
            return True
        if "Root Cause" in text or text.startswith("Failures:"):
            self._trace = None
            return True
        if _ENTRY.match(text):
            self._trace = None
            self.entries.append(Failed())
            return True
        if self._trace is not None:
            self._traced(text)
            return True
        field = _FIELD.match(text)
        if field is not None and self.entries:
            self._field(field[1], field[2].strip())
        return True

    def _field(self, name: str, value: str) -> None:
        entry = self.entries[-1]
        if name == "host":
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
