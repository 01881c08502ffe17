"""Calls of collectives brought together over ranks, and the ranks' clocks by the ends that those calls share.

Profilers of one job start tens of milliseconds apart and count a different number of calls, so that calls are matched
from the end of the windows. A collective ends everywhere at about the same moment: the median difference of the ends is
the difference of two ranks' clocks, however far apart their hosts' are.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from dtobs.timeline.kineto.load import Floats, Ints, Spans, TracedRank
from dtobs.timeline.kineto.names import KernelKind, TracedCall

Key = tuple[str, tuple[int, ...], tuple[int, int] | None]
_ALIKE = 0.9
_SHIFTS = 16
_SETTLED_US = 50.0
NOBODY = (-1, -1)
"""In a key: messages between two ranks of which the trace does not say which two."""
NAMELESS: Key = ("", (), None)
"""A call of which no group is known. Where other calls of its operation have one, it was launched before the trace
began and may be of any of them: it is compared with no other rank's.
"""
_COMMON_END = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"}


@dataclass
class TracedGroup:
    """The calls of one group that all its present ranks have: a row a rank, a column a call, on one clock."""

    key: Key
    ranks: tuple[int, ...]
    members: tuple[int, ...]  #: all of the group as far as the traces say, present or not
    begin: Floats
    end: Floats
    calls: list[TracedCall]
    step: Ints | None = None  #: the ProfilerStep whose host launched each call; None where no rank's trace has steps

    @property
    def last(self) -> Floats:
        """When the last of the present ranks arrived at each call."""
        found: Floats = self.begin.max(axis=0)
        return found


@dataclass
class MatchedTraces:
    """Everything that could be brought together."""

    groups: list[TracedGroup]
    offsets: dict[int, float]  #: what to take from a rank's times to have the first rank's
    notes: list[str] = field(default_factory=list)
    alone: dict[int, list[tuple[Key, Spans]]] = field(default_factory=dict)  #: a rank's calls that are in no group


@dataclass
class _Side:
    """One rank's calls of one group, in order."""

    begin: Floats
    end: Floats
    sign: Ints
    calls: list[TracedCall]
    damaged: bool
    step: Ints | None


def match(ranks: dict[int, TracedRank]) -> MatchedTraces:
    """Match the calls of all ranks."""
    sides: dict[Key, dict[int, _Side]] = defaultdict(dict)
    members: dict[Key, tuple[int, ...]] = {}
    sizes: dict[Key, int] = {}
    signs: dict[tuple[str, int], int] = {}
    for number, rank in sorted(ranks.items()):
        for key, side in _sides(rank, number, signs).items():
            sides[key][number] = side
            members[key] = key[1] if key[2] in (None, NOBODY) else key[2]
            sizes[key] = max(sizes.get(key, 0), side.calls[0].size if key[2] in (None, NOBODY) else 2)
    notes, paired = [], []
    for key, by_rank in sides.items():
        if members[key] and not set(by_rank) <= set(members[key]):
            by_rank = {r: s for r, s in by_rank.items() if r in members[key]}
        if sizes[key] and len(by_rank) > sizes[key]:
            notes.append(f"group {key[0] or '?'}: {len(by_rank)} ranks say that it has {sizes[key]}; not compared")
        elif len(by_rank) > 1:
            paired.append((key, by_rank, _columns(by_rank)))
    offsets = _clocks(ranks, paired)
    groups: dict[Key, TracedGroup] = {}
    for key, by_rank, columns in paired:
        group = _group(key, members[key] or tuple(sorted(by_rank)), by_rank, columns, offsets)
        if group is not None:
            groups[key] = group
    alone: dict[int, list[tuple[Key, Spans]]] = defaultdict(list)
    for key, by_rank in sides.items():
        for r, side in by_rank.items():
            if key not in groups or r not in groups[key].ranks:
                alone[r].append((key, Spans(side.begin - offsets[r], side.end - offsets[r])))
    return MatchedTraces(list(groups.values()), offsets, notes, alone)


def _sides(rank: TracedRank, number: int, signs: dict[tuple[str, int], int]) -> dict[Key, _Side]:
    chosen = np.flatnonzero((rank.kind == KernelKind.COMMUNICATION) & (rank.call >= 0))
    keys = [_key(call, number) for call in rank.calls]
    named = {call.op for call, key in zip(rank.calls, keys, strict=True) if key[0] or key[1]}
    keys = [
        ("", (number,), None) if key == NAMELESS and call.op in named else key
        for call, key in zip(rank.calls, keys, strict=True)
    ]
    numbers = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    group_of = np.array([numbers[key] for key in keys], dtype=np.int64)[rank.call[chosen]] if len(chosen) else chosen
    sign_of = np.array([signs.setdefault((c.op, c.nbytes), len(signs)) for c in rank.calls], dtype=np.int64)
    step = rank.step_numbers()
    found = {}
    for key, place in numbers.items():
        mine = chosen[group_of == place]
        if not len(mine):
            continue
        mine = mine[np.argsort(rank.device.begin[mine], kind="stable")]
        calls = [rank.calls[c] for c in rank.call[mine].tolist()]
        begin, end = rank.device.begin[mine], rank.device.end[mine]
        found[key] = _Side(
            begin, end, sign_of[rank.call[mine]], calls, bool(rank.damage), None if step is None else step[mine]
        )
    return found


def _key(call: TracedCall, rank: int) -> Key:
    if call.op != "send_recv":
        return (call.group, call.ranks, None)
    source, target = (rank if peer < 0 else peer for peer in call.peers or NOBODY)
    return (call.group, call.ranks, (source, target) if source != target else NOBODY)


def _columns(by_rank: dict[int, _Side]) -> dict[int, Ints]:
    """For each rank which of its calls is which of the first rank's: its row for each of theirs, -1 where missing."""
    first = next(iter(by_rank.values()))
    count = len(first.end)
    found = {}
    for number, side in by_rank.items():
        shift = 0 if side is first else _shift(first, side)
        rows = np.arange(count) - count + len(side.end) - (shift or 0)
        found[number] = np.where((rows >= 0) & (rows < len(side.end)) & (shift is not None), rows, -1)
    return found


def _shift(first: _Side, other: _Side) -> int | None:
    """How many calls `other` has at its end that `first` lacks; None when the two do not call the same."""
    far = _SHIFTS
    if first.damaged or other.damaged:
        far = min(max(len(first.end), len(other.end)), 2048)
    tried: dict[int, tuple[float, float]] = {}
    for shift in sorted(range(-far, far + 1), key=abs):
        ends = (len(first.end) - max(-shift, 0), len(other.end) - max(shift, 0))
        common = min(ends)
        if common < 1 or (shift and common < min(4, len(first.end))):
            continue
        mine, theirs = slice(ends[0] - common, ends[0]), slice(ends[1] - common, ends[1])
        alike = float(np.mean(first.sign[mine] == other.sign[theirs]))
        difference = other.end[theirs] - first.end[mine]
        tried[shift] = (alike, float(np.median(np.abs(difference - np.median(difference)))))
    likely = {s: spread for s, (alike, spread) in tried.items() if alike >= _ALIKE}
    if not likely:
        return None
    nearest = min(likely, key=abs)
    best = min(likely, key=lambda s: (likely[s], abs(s)))
    clear = likely[nearest] > _SETTLED_US and likely[best] < likely[nearest] / 4
    return best if clear else nearest


def _clocks(
    ranks: dict[int, TracedRank], paired: list[tuple[Key, dict[int, _Side], dict[int, Ints]]]
) -> dict[int, float]:
    """Each rank's clock against the lowest rank's, by way of whoever shares calls with whom."""
    links: dict[int, dict[int, list[tuple[bool, int, float]]]] = defaultdict(lambda: defaultdict(list))
    for key, by_rank, columns in paired:
        first, *others = by_rank
        for number in others:
            both = (columns[number] >= 0) & (columns[first] >= 0)
            if not both.any():
                continue
            ends = by_rank[number].end[columns[number][both]] - by_rank[first].end[columns[first][both]]
            common = by_rank[first].calls[0].op in _COMMON_END
            difference = float(np.median(ends))
            if key[2] == NOBODY and float(np.median(np.abs(ends - difference))) > _SETTLED_US:
                continue  # other pairs' messages
            links[first][number].append((common, len(ends), difference))
            links[number][first].append((common, len(ends), -difference))
    offsets: dict[int, float] = {}
    for start in sorted(ranks):
        if start in offsets:
            continue
        base = ranks[min(ranks)].base_us
        offsets[start] = base - ranks[start].base_us if ranks[start].base_us and base else 0.0
        queue = [start]
        while queue:
            here = queue.pop(0)
            for number, known in sorted(links[here].items()):
                if number not in offsets:
                    offsets[number] = offsets[here] + max(known)[2]
                    queue.append(number)
    return offsets


def _group(
    key: Key,
    members: tuple[int, ...],
    by_rank: dict[int, _Side],
    columns: dict[int, Ints],
    offsets: dict[int, float],
) -> TracedGroup | None:
    ranks = [r for r in by_rank if (columns[r] >= 0).any()]
    if len(ranks) < 2:
        return None
    keep = np.all([columns[r] >= 0 for r in ranks], axis=0)
    begin = np.array([by_rank[r].begin[columns[r][keep]] - offsets[r] for r in ranks])
    end = np.array([by_rank[r].end[columns[r][keep]] - offsets[r] for r in ranks])
    if not begin.size:
        return None
    if key[2] == NOBODY and float(np.median(np.ptp(end, axis=0))) > _SETTLED_US:
        return None  # they were messages between other pairs of ranks: what is one call ends at one time
    first = by_rank[ranks[0]]
    calls = [first.calls[i] for i in columns[ranks[0]][keep].tolist()]
    step = next((s[columns[r][keep]] for r in ranks if (s := by_rank[r].step) is not None), None)
    return TracedGroup(key, tuple(ranks), members, begin, end, calls, step)
