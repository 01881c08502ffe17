"""Both sides of the gradient ledger, brought together from all ranks that share a gradient.

What ranks wrote is read once: a monitor that looks again reads what is new, and keeps the results of the older looks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dtobs.detectors.silent.mixing import Judged, Look, judge
from dtobs.recording.laws import LEDGER, SKETCHES, Side
from dtobs.recording.view import RunView

NEWEST = 2048
"""Records of a rank that are read: some hundred looks."""
MOST_RANKS = 256
"""Ranks that share one gradient, beyond which none is judged."""
MOST_MICROS = 64
KEPT = 4096
"""Judged looks that are kept of one set of ranks."""
_BATCH_BYTES = 1 << 26
_FINAL = int(Side.FINAL)
Ranks = tuple[int, ...]
Key = tuple[int, str, Ranks]
Records = npt.NDArray[np.void]
Integers = npt.NDArray[np.int64]


@dataclass
class _Entry:
    """The ``law`` entry of a rank: `rows` are the names of its parameters, row n is shared by ``sets[of[n]]``."""

    raw: dict[str, Any]
    rows: list[str]
    sets: list[Ranks]
    of: Integers
    since: int
    ignored: set[str]


@dataclass
class _Memo:
    """What was read: up to which record of each rank, which of those wait for other ranks, and what was judged."""

    at_ns: int = -1
    entries: dict[int, _Entry] = field(default_factory=dict)
    marks: dict[int, int] = field(default_factory=dict)
    waiting: dict[Ranks, dict[int, Records]] = field(default_factory=dict)
    judged: dict[Ranks, dict[tuple[int, str], Judged]] = field(default_factory=dict)


def judged_looks(view: RunView) -> list[Judged]:
    """Every look that all ranks sharing the gradient took part in, judged, in the order of the steps."""
    memo: _Memo = view.memo.setdefault(LEDGER.name, _Memo())
    if memo.at_ns != view.now_ns:
        memo.at_ns = view.now_ns
        for ranks, new in _read(view, memo).items():
            known = memo.judged.setdefault(ranks, {})
            for look in _together(ranks, new, memo):
                known.pop((look.step, look.name), None)  # a step that was done again
                known[look.step, look.name] = judge(look)
            for key in list(known)[: max(0, len(known) - KEPT)]:
                del known[key]
    every = [one for known in memo.judged.values() for one in known.values()]
    return sorted(every, key=lambda one: (one.step, one.name, one.ranks))


def looks(view: RunView) -> Iterator[Look]:
    """Every look that all ranks sharing the gradient took part in, one set of ranks after the other."""
    memo = _Memo()
    for ranks, records in _read(view, memo).items():
        yield from _together(ranks, records, memo)


def ledger_entry(view: RunView, rank: int) -> dict[str, Any]:
    """The ``law`` entry of `rank`, checked: names, since, and those ignored; {} where it has none or a damaged one."""
    raw, memo = view.meta(rank).laws.get(LEDGER.name, {}), view.memo.get(LEDGER.name)
    entry = memo.entries.get(rank) if isinstance(memo, _Memo) else None
    if entry is None or entry.raw is not raw:
        entry = _checked(raw)
    return {} if entry is None else {"names": entry.rows, "since": entry.since, "ignored": entry.ignored}


def _checked(raw: dict[str, Any]) -> _Entry | None:
    try:
        names = [str(name) for name in raw["rows"]]
        sets = [tuple(int(r) for r in ranks) for ranks in raw["sets"]]
        of = np.array([int(n) for n in raw["of"]], np.int64)
        ignored = {names[int(n)] for n in raw.get("ignored", ())}
        if len(of) != len(names) or (len(of) and not 0 <= of.min() <= of.max() < len(sets)):
            return None
        return _Entry(raw, names, sets, of, int(raw.get("since", 0)), ignored)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError):
        return None


def _enter(view: RunView, memo: _Memo) -> None:
    """Take the entries over; where one is another than before (another model), forget what was read and judged."""
    for rank in view.ranks:
        raw = view.meta(rank).laws.get(LEDGER.name, {})
        known = memo.entries.get(rank)
        if known is not None and (known.raw is raw or known.raw == raw):
            continue
        if known is not None:
            memo.marks, memo.waiting, memo.judged = {}, {}, {}
        entry = _checked(raw)
        if entry is not None:
            memo.entries[rank] = entry
        else:
            memo.entries.pop(rank, None)


def _read(view: RunView, memo: _Memo) -> dict[Ranks, dict[int, Records]]:
    """What is new since the last time, by set and rank, with what has waited; only of sets that have anything new."""
    fresh: set[Ranks] = set()
    _enter(view, memo)
    for rank, entry in sorted(memo.entries.items()):
        if not entry.rows:
            continue
        new = view.law_since(LEDGER, rank, memo.marks.get(rank, 0), NEWEST)
        if not len(new):
            continue
        memo.marks[rank] = int(new["stamp"][-1])
        new = new[(new["step"] >= entry.since) & (new["row"] < len(entry.rows))]
        of = entry.of[new["row"]]
        for number in np.unique(of).tolist():
            ranks, here = entry.sets[number], new[of == number]
            waiting = memo.waiting.setdefault(ranks, {})
            before = waiting.get(rank)
            waiting[rank] = here if before is None else np.concatenate([before, here])[-NEWEST:]
            fresh.add(ranks)
    return {ranks: memo.waiting[ranks] for ranks in sorted(fresh)}


def _together(ranks: Ranks, records: dict[int, Records], memo: _Memo) -> Iterator[Look]:
    """The looks of one set of ranks that are complete; what is not stays in `records`.

    A look of one rank ends with its FINAL record. Of a step that was done again, the later time counts.
    """
    if len(ranks) > MOST_RANKS or not all(rank in records for rank in ranks):
        return
    names = sorted({name for rank in ranks for name in memo.entries[rank].rows})
    number = {name: n for n, name in enumerate(names)}
    every = np.concatenate([records[rank] for rank in ranks])
    lengths = [len(records[rank]) for rank in ranks]
    q = np.repeat(np.arange(len(ranks)), lengths)
    row = np.concatenate([_numbers(memo.entries[rank], number)[records[rank]["row"]] for rank in ranks])
    keys, which = np.unique(every["step"] * len(names) + row, return_inverse=True)
    cell = which * len(ranks) + q
    order = np.argsort(cell, kind="stable")
    every, cell = every[order], cell[order]
    final = every["side"] == _FINAL
    counts = np.bincount(cell[final], minlength=len(keys) * len(ranks))
    complete: npt.NDArray[np.bool_] = np.all(counts.reshape(len(keys), len(ranks)) > 0, axis=1)
    # How many FINAL records of the same rank and look are this one or come after it: 1 for the last time.
    done = np.concatenate([[0], np.cumsum(final)])
    first = np.concatenate([[0], np.cumsum(counts)])
    left = first[cell + 1] - done[:-1]
    used = complete[cell // len(ranks)] & (left == 1)
    over = complete[cell // len(ranks)] & (left >= 1)
    back = np.empty(len(order), bool)
    back[order] = ~over
    for rank, begin, length in zip(ranks, np.cumsum([0, *lengths[:-1]]).tolist(), lengths, strict=True):
        records[rank] = records[rank][back[begin : begin + length]]
    yield from _looks(ranks, names, keys, every[used], cell[used])


def _numbers(entry: _Entry, number: Mapping[str, int]) -> Integers:
    return np.array([number[name] for name in entry.rows], np.int64)


def _looks(ranks: Ranks, names: list[str], keys: Integers, records: Records, cell: Integers) -> Iterator[Look]:
    """Looks whose `records` are complete: ``cell`` is place in `keys` times ranks, plus place in `ranks`; ascending."""
    count = len(ranks)
    final = records["side"] == _FINAL
    finals, places = records[final], cell[final][::count] // count
    if not len(finals):
        return
    parts = finals["part"].reshape(-1, count)
    locals_, at = records[~final], cell[~final]
    look = np.searchsorted(places, at // count)
    micros = np.zeros(len(places), np.int64)
    np.maximum.at(micros, look, locals_["micro"].astype(np.int64) + 1)  # 0: the gradient never passed where it is read
    alike, kind = np.unique(np.column_stack([micros, parts]), axis=0, return_inverse=True)
    kind = kind.reshape(-1)
    for n, (depth, *own) in enumerate(alike.tolist()):
        if not 0 < depth <= MOST_MICROS:
            continue
        held = np.unique(own)
        part = np.searchsorted(held, own)
        mine = np.flatnonzero(kind == n)
        batch = max(1, _BATCH_BYTES // (count * depth * len(held) * SKETCHES * 8))
        for begin in range(0, len(mine), batch):
            some = mine[begin : begin + batch]
            chosen = np.flatnonzero(np.isin(look, some) & np.isin(locals_["part"], held))
            place = np.searchsorted(some, look[chosen]), at[chosen] % count, locals_["micro"][chosen]
            slot = (*place, np.searchsorted(held, locals_["part"][chosen]))
            local = np.zeros((len(some), count, depth, len(held), SKETCHES))
            local[slot] = locals_["value"][chosen]
            for i, which in enumerate(some.tolist()):
                step, name = divmod(int(keys[places[which]]), len(names))
                end = finals[which * count : (which + 1) * count]
                yield Look(step, names[name], ranks, local[i], end["value"], end["scale"], part, end["flags"])
