"""The columns of the table of ranks: what each cell says, in which tone, and which columns fit a width."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dtobs.tui import words
from dtobs.tui.model import ScreenFrame
from dtobs.tui.rows import Level, RankRow
from dtobs.words import NONE, bytes_text, duration_text, significant

Tone = Literal[Level, "", "dim", "strong", "busy", "waiting"]
Piece = tuple[str, Tone]

BAR_WIDTH = 14
_STALE_SECONDS = 10.0


@dataclass(frozen=True)
class Scale:
    """What cells are drawn relative to: the longest step and the usual gradient norm of the ranks shown."""

    step_seconds: float = 0.0
    norm: float = 0.0

    @classmethod
    def of(cls, rows: Sequence[RankRow]) -> Scale:
        """The scale of these rows."""
        steps = [(r.busy_seconds or 0.0) + (r.wait_seconds or 0.0) for r in rows]
        norms = [r.local_norm for r in rows if r.local_norm is not None and math.isfinite(r.local_norm)]
        return cls(max(steps, default=0.0), statistics.median(norms) if norms else 0.0)


@dataclass(frozen=True)
class Column:
    """One column. `priority` 0 is always shown; higher ones go first when there is no room."""

    key: str
    title: str
    width: int
    priority: int
    right: bool
    cell: Callable[[RankRow, Scale], list[Piece]]
    sort: str = ""  #: key of `order.KEYS` that this column is sorted by


def _rank(row: RankRow, scale: Scale) -> list[Piece]:
    worst: Tone = "bad" if row.level == "bad" or row.accused == "critical" else "warn"
    mark: Piece = ("● ", worst) if row.suspicious else ("  ", "")
    return [mark, (str(row.rank), "strong")]


def _state(row: RankRow, scale: Scale) -> list[Piece]:
    return [(words.shorten(row.doing, 24), row.level)]


def _phase(row: RankRow, scale: Scale) -> list[Piece]:
    if not row.phase:
        return [(NONE, "dim")]
    long = row.phase_seconds is not None and row.phase_seconds >= 1.0
    since = f" {words.age(row.phase_seconds)}" if long else ""
    return [(words.shorten(row.phase, 12), ""), (since, "warn" if (row.phase_seconds or 0) >= 30 else "dim")]


def _bar(row: RankRow, scale: Scale) -> list[Piece]:
    if row.busy_seconds is None or not scale.step_seconds:
        return [("", "")]
    busy = min(BAR_WIDTH, round(row.busy_seconds / scale.step_seconds * BAR_WIDTH))
    wait = round((row.wait_seconds or 0.0) / scale.step_seconds * BAR_WIDTH)
    wait = min(BAR_WIDTH - busy, max(wait, 0))
    return [("█" * busy, "busy"), ("█" * wait, "waiting"), ("·" * (BAR_WIDTH - busy - wait), "dim")]


def _norm(row: RankRow, scale: Scale) -> list[Piece]:
    value = row.local_norm
    if value is None:
        return [(NONE, "dim")]
    odd = not math.isfinite(value) or (scale.norm > 0 and value > 10 * scale.norm)
    return [(words.number(value), "bad" if odd else "")]


def _loss(row: RankRow, scale: Scale) -> list[Piece]:
    bad = row.loss is not None and not math.isfinite(row.loss)
    return [(words.number(row.loss), "bad" if bad else "" if row.loss is not None else "dim")]


def _memory(row: RankRow, scale: Scale) -> list[Piece]:
    if row.memory_bytes is None:
        return [(NONE, "dim")]
    share = row.memory_bytes / row.memory_total_bytes if row.memory_total_bytes else None
    if share is None:
        return [(bytes_text(row.memory_bytes, digits=significant), "")]
    return [(f"{bytes_text(row.memory_bytes, digits=significant)} {share:.0%}", "warn" if share > 0.95 else "")]


def _collective(row: RankRow, scale: Scale) -> list[Piece]:
    if not row.collective:
        return [(NONE, "dim")]
    return [(words.shorten(row.collective, 16), ""), (f" #{row.collective_seq}", "dim")]


def _seen(row: RankRow, scale: Scale) -> list[Piece]:
    age = row.heartbeat_seconds
    if age is None:
        return [(NONE, "dim")]
    return [("now" if age < 1 else words.age(age), "warn" if age >= _STALE_SECONDS else "dim")]


def _time(name: str) -> Callable[[RankRow, Scale], list[Piece]]:
    def cell(row: RankRow, scale: Scale) -> list[Piece]:
        value = getattr(row, name)
        return [(duration_text(value, digits=significant), "" if value is not None else "dim")]

    return cell


COLUMNS: tuple[Column, ...] = (
    Column("rank", "rank", 6, 0, True, _rank, "rank"),
    Column("host", "host", 14, 9, False, lambda r, s: [(words.shorten(r.host, 14) or NONE, "dim")]),
    Column("place", "place", 22, 10, False, lambda r, s: [(words.shorten(r.place, 22) or NONE, "dim")]),
    Column("state", "state", 19, 0, False, _state, "state"),
    Column("step", "step", 7, 0, True, lambda r, s: [(f"{r.step:,}", "") if r.steps else (NONE, "dim")]),
    Column("phase", "phase", 17, 3, False, _phase),
    Column("busy", "busy", 8, 1, True, _time("busy_seconds"), "busy"),
    Column("wait", "wait", 8, 1, True, _time("wait_seconds"), "wait"),
    Column("bar", "busy + wait", BAR_WIDTH, 6, False, _bar),
    Column("late", "late", 8, 7, True, _time("late_seconds"), "late"),
    Column("norm", "local norm", 10, 2, True, _norm, "norm"),
    Column("loss", "loss", 8, 8, True, _loss, "loss"),
    Column("memory", "memory", 12, 5, True, _memory, "memory"),
    Column("collective", "collective", 21, 7, False, _collective),
    Column("seen", "seen", 6, 4, True, _seen, "heartbeat"),
)


_GAP = 2
"""Characters between two columns."""


def fitting(frame: ScreenFrame, width: int) -> tuple[Column, ...]:
    """The columns that fit `width` characters with `_GAP` between them; a host column only with several hosts."""
    absent = {"host"} if frame.hosts < 2 else set()
    for key, said in (("late", "late_seconds"), ("loss", "loss"), ("place", "place")):
        if frame.rows and all(getattr(row, said) in (None, "") for row in frame.rows):
            absent.add(key)
    wanted = [c for c in COLUMNS if c.key not in absent]
    room = width
    chosen: set[str] = set()
    for column in sorted(wanted, key=lambda c: c.priority):
        if column.width + _GAP > room and column.priority:
            continue
        room -= column.width + _GAP
        chosen.add(column.key)
    # "waits in reduce_scatter" is 23 characters long
    wide = {"state": 23} if room >= 4 else {}
    return tuple(replace(c, width=wide.get(c.key, c.width)) for c in wanted if c.key in chosen)
