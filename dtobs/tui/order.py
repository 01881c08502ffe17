"""Which ranks are shown and in which order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from dtobs.tui.rows import RankRow

MAX_ROWS = 256
"""With more ranks than this the screen shows the worst ones."""

MANY = 64
"""From this many ranks on, those that differ from most come first, until the user sorts by something."""

_SEVERITY = {"bad": 0, "warn": 1, "wait": 2, "ok": 3, "done": 4}

KEYS: dict[str, Callable[[RankRow], float | None]] = {
    "rank": lambda row: -row.rank,
    "state": lambda row: -_SEVERITY[row.level],
    "busy": lambda row: row.busy_seconds,
    "wait": lambda row: row.wait_seconds,
    "late": lambda row: row.late_seconds,
    "norm": lambda row: row.local_norm,
    "loss": lambda row: row.loss,
    "memory": lambda row: row.memory_bytes,
    "heartbeat": lambda row: row.heartbeat_seconds,
}
"""Sort keys by name; the largest comes first (so that rank 0 does for "rank", the worst state for "state")."""


@dataclass(frozen=True)
class Order:
    """How the table is arranged."""

    key: str = "rank"
    reverse: bool = False
    suspicious_only: bool = False

    def next_key(self) -> Self:
        """The next sort key, in its natural direction."""
        names = list(KEYS)
        return replace(self, key=names[(names.index(self.key) + 1) % len(names)], reverse=False)

    def by(self, key: str) -> Self:
        """Sort by `key`; by the same key again, the other way round."""
        return replace(self, key=key, reverse=self.key == key and not self.reverse)


def arrange(rows: Sequence[RankRow], order: Order, limit: int = MAX_ROWS) -> list[RankRow]:
    """The rows to show. Unknown values come last, NaN first; past `limit` suspicious ranks are kept first."""
    kept = [row for row in rows if row.suspicious or row.odd or not order.suspicious_only]
    key = KEYS[order.key]

    def place(row: RankRow) -> tuple[bool, float, int]:
        value = key(row)
        if value is None:
            return True, 0.0, row.rank
        size = math.inf if math.isnan(value) else value
        return False, size if order.reverse else -size, row.rank

    kept.sort(key=place)
    if len(kept) <= limit and (len(kept) < MANY or order != Order()):
        return kept
    like = Counter(row.doing for row in rows)
    odd = sorted(kept, key=lambda r: (not r.suspicious, not r.odd, like[r.doing], _SEVERITY[r.level]))[:limit]
    if order == Order():
        return odd
    worst = {row.rank for row in odd}
    return [row for row in kept if row.rank in worst]
