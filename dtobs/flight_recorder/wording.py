"""Findings' words: ranks, calls and call sites as a person reads them, and the records they rest on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dtobs.calls.words import named
from dtobs.flight_recorder.model import Dumps

MAX_LISTED = 16
_STATE = ("scheduled", "started", "completed", "unknown", "issued")


class Words:
    """Texts about the entries of one `Dumps`."""

    def __init__(self, dumps: Dumps) -> None:
        self.dumps = dumps

    def ranks(self, rows: Iterable[int]) -> tuple[int, ...]:
        """Global ranks of rows."""
        return tuple(sorted(self.dumps.ranks[row].rank for row in rows))

    def named(self, rows: Iterable[int]) -> str:
        """``ranks 1, 4-7`` of rows, or only how many where that would be long."""
        return named(self.ranks(rows))

    def call(self, entry: int) -> str:
        """``all_reduce [4, 3] Float #12 of group 0 (default_pg)``."""
        record = self.dumps.entries[entry]
        group = self.dumps.groups[int(record["group"])]
        number = f" #{int(record['seq'])}" if int(record["source"]) < 0 else ""
        return f"{self.operation(entry)}{number} of group {group.label}"

    def operation(self, entry: int) -> str:
        """``all_reduce [4, 3] Float``; sends and receives with their peer."""
        record = self.dumps.entries[entry]
        text = str(self.dumps.operations[int(record["signature"])])
        if int(record["source"]) < 0:
            return text
        group = int(record["group"])
        source, target = (self.dumps.rank_at(group, int(record[end])) for end in ("source", "target"))
        return f"{text} (rank {source} to rank {target})" if min(source, target) >= 0 else text

    def family(self, entry: int) -> str:
        """``all_reduce``: an entry's operation without sizes, under the one name that all its spellings share."""
        return self.dumps.operations[int(self.dumps.entries["signature"][entry])].family

    def site(self, entry: int) -> str:
        """`` at train.py:12 in step``, "" when the dump has no stacks."""
        site = int(self.dumps.entries["site"][entry])
        return f" at {self.dumps.sites[site]}" if site >= 0 else ""

    def doing(self, row: int) -> str:
        """What a rank's dump says it called last."""
        low, high = self.dumps.bounds[row : row + 2]
        if low == high:
            return "its dump holds no call at all"
        last = high - 1
        return f"the last it called was {self.call(last)}{self.site(last)}"

    def evidence(self, what: str, entries: Sequence[int], **more: Any) -> dict[str, Any]:
        """A record of evidence: the entries, at most MAX_LISTED, as the dumps have them."""
        listed = []
        for entry in entries[:MAX_LISTED]:
            record = self.dumps.entries[entry]
            site = int(record["site"])
            listed.append(
                {
                    "rank": self.dumps.ranks[int(self.dumps.row[entry])].rank,
                    "call": self.operation(entry),
                    "group": self.dumps.groups[int(record["group"])].label,
                    "seq": int(record["seq"]),
                    "record_id": int(record["record"]),
                    "state": _STATE[int(record["state"])],
                    "site": self.dumps.sites[site] if site >= 0 else None,
                }
            )
        return {"what": what, **more, "entries": listed}

    def last_entries(self, rows: Iterable[int]) -> list[int]:
        """The last entry of each of some ranks."""
        bounds = self.dumps.bounds
        return [bounds[row + 1] - 1 for row in rows if bounds[row + 1] > bounds[row]]
