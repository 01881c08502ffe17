"""What filled a device's memory at its peak and when an allocation was refused, and what grows: from the history of a
snapshot, the events of the allocator in order.

Memory grows where its lows rise. Training fills and empties memory with every micro-batch, so that only the level to
which it falls back tells what is kept. Levels are counted back from what the snapshot holds at the end.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from dtobs.timeline.allocation_sites import NO_PYTHON, NO_STACK, AllocationSite, site

POINTS = 60
"""Of the curve of the whole history."""
DEEP = 0.25
"""A fall of so much of the deepest one ends at a low."""
LEAST_LOWS = 8
LOOKS = (0.3, 0.45, 0.6, 0.75)
"""Between any two of these parts of the lows memory has to rise: not with the first steps, which allocate what stays,
and not with the last, which is not over yet."""
GROWTH = 0.005
"""It has to rise by so much of its level altogether,"""
JUMP = 0.6
"""and by at most so much of that between two of them."""
_FREED = ("free_completed", "free")
EARLIER = AllocationSite("(allocated before the history begins)", "unknown")


@dataclass
class Moment:
    """What was allocated at one time of the history, in bytes."""

    at_s: float = 0.0  #: since the history began
    allocated: int = 0
    reserved: int = 0
    frames: Counter[str] = field(default_factory=Counter)
    categories: Counter[str] = field(default_factory=Counter)

    def to_json(self) -> dict[str, Any]:
        """The moment in the JSON of `dtobs memory`."""
        return {
            "at_s": round(self.at_s, 6),
            "allocated_bytes": self.allocated,
            "reserved_bytes": self.reserved,
            "categories": dict(self.categories.most_common()),
            "frames": [{"frame": name, "bytes": size} for name, size in self.frames.most_common(12)],
        }


@dataclass(frozen=True)
class Growth:
    """How the memory rises to which the device falls back, and the places that keep what is new."""

    total: int  #: bytes
    begin_s: float  #: when in the history the first of the compared lows was,
    end_s: float  #: and the last
    frames: tuple[tuple[str, int], ...]

    def to_json(self) -> dict[str, Any]:
        """The growth in the JSON of `dtobs memory`."""
        frames = [{"frame": name, "bytes": size} for name, size in self.frames]
        return {"bytes": self.total, "from_s": self.begin_s, "to_s": self.end_s, "frames": frames}


@dataclass(frozen=True)
class Refusal:
    """The last allocation that failed; `then` is what was allocated at that time."""

    size: int
    free: int  #: on the device
    place: str
    then: Moment

    def to_json(self) -> dict[str, Any]:
        """The refusal in the JSON of `dtobs memory`."""
        return {"bytes": self.size, "free_bytes": self.free, "frame": self.place, **self.then.to_json()}


@dataclass
class AllocationHistory:
    """What the events of one device tell."""

    seconds: float = 0.0
    curve: list[float] = field(default_factory=list)  #: the highest level in each of `POINTS` parts, bytes
    peak: Moment | None = None
    refusal: Refusal | None = None
    growth: Growth | None = None


def size_of(value: Any) -> int:
    """A number of bytes; 0 for what is none."""
    return value if type(value) is int and 0 <= value < 1 << 60 else 0


def address_of(value: Any) -> int | None:
    """An address, of which some devices have negative ones; None for what is none."""
    return value if type(value) is int else None


def history(events: list[Any], held: dict[int, tuple[int, AllocationSite]], reserved: int) -> AllocationHistory:
    """Replay the events of one device backwards in their sums and forwards in their places.

    `held` is what is allocated at the end, by address: its size and site; `reserved` what the allocator then holds.
    """
    known = [e for e in events if isinstance(e, dict) and isinstance(e.get("action"), str)]
    if not any(e["action"] in (*_FREED, "alloc", "oom") for e in known):
        return AllocationHistory()
    return _Replay(known, held, reserved).run()


class _Replay:
    def __init__(
        self, events: list[dict[str, Any]], held: dict[int, tuple[int, AllocationSite]], reserved: int
    ) -> None:
        self.events = events
        self.sites: dict[int, AllocationSite] = {}
        self.stacks = any(e.get("frames") for e in events if e["action"] == "alloc")
        self.live: dict[int | None, AllocationSite] = {}  #: what is allocated and was so in the history
        self.deltas: list[tuple[int, int]] = []  #: of each event: allocated, reserved
        allocated: dict[int | None, int] = {}
        self.earlier = 0  #: bytes that the history frees and did not allocate
        for event in events:
            self.deltas.append(self._delta(event, allocated))
        made = {address_of(e.get("addr")) for e in events if e["action"] == "alloc"}
        kept = {address: entry for address, entry in held.items() if address not in made}  # since before the history
        self.frames: Counter[str] = Counter()
        self.categories: Counter[str] = Counter()
        for size, where in (*kept.values(), (self.earlier, EARLIER)):
            self._count(size, where)
        self.allocated = self.frames.total()
        self.reserved = max(reserved - sum(d for _, d in self.deltas), 0)

    def _delta(self, event: dict[str, Any], allocated: dict[int | None, int]) -> tuple[int, int]:
        action, address, size = event["action"], address_of(event.get("addr")), size_of(event.get("size"))
        if action == "alloc":
            allocated[address] = size
            return size, 0
        if action in _FREED:
            known = allocated.pop(address, None)
            if known is None:
                self.earlier += size
            return -(size if known is None else known), 0
        if action in ("segment_alloc", "segment_map"):
            return 0, size
        return 0, -size if action in ("segment_free", "segment_unmap") else 0

    def _site(self, event: dict[str, Any]) -> AllocationSite:
        frames = event.get("frames")
        if not frames and self.stacks:
            found = site(event)
            return AllocationSite(NO_PYTHON, "gradients") if found.place == NO_STACK else found
        key = id(frames)
        if key not in self.sites:
            self.sites[key] = site(event)
        return self.sites[key]

    def _count(self, size: int, where: AllocationSite) -> None:
        self.frames[where.place] += size
        self.categories[where.category] += size

    def _moment(self, at: float) -> Moment:
        frames, categories = (Counter({k: v for k, v in c.items() if v > 0}) for c in (self.frames, self.categories))
        return Moment(at, self.allocated, self.reserved, frames, categories)

    def run(self) -> AllocationHistory:
        levels, level = [], self.allocated
        for allocated, _ in self.deltas:
            level += allocated
            levels.append(level)
        begin, end = (self._time(e) for e in (self.events[0], self.events[-1]))
        found = AllocationHistory(max(end - begin, 0) / 1e6, _curve(levels))
        highest = levels.index(max(levels))
        rising = _rising(levels)
        refused = max((n for n, e in enumerate(self.events) if e["action"] == "oom"), default=-1)
        seen: list[Moment] = []
        for number, event in enumerate(self.events):
            self._apply(event, self.deltas[number])
            at = max(self._time(event) - begin, 0) / 1e6
            if number == highest:
                found.peak = self._moment(at)
            if number in rising:
                seen.append(self._moment(at))
            if number == refused:
                sizes = size_of(event.get("size")), size_of(event.get("device_free"))
                found.refusal = Refusal(*sizes, self._site(event).place, self._moment(at))
        found.growth = _growth(seen[0], seen[-1]) if len(seen) > 1 else None
        return found

    def _apply(self, event: dict[str, Any], delta: tuple[int, int]) -> None:
        self.allocated, self.reserved = self.allocated + delta[0], max(self.reserved + delta[1], 0)
        address = address_of(event.get("addr"))
        if event["action"] == "alloc":
            self.live[address] = self._site(event)
            self._count(delta[0], self.live[address])
        elif delta[0]:
            self._count(delta[0], self.live.pop(address, EARLIER))

    @staticmethod
    def _time(event: dict[str, Any]) -> int:
        return size_of(event.get("time_us"))


def _curve(levels: list[int]) -> list[float]:
    parts = min(POINTS, len(levels))
    edges = [round(n * len(levels) / parts) for n in range(parts + 1)]
    return [float(max(levels[a:b])) for a, b in pairwise(edges)]


def _lows(levels: list[int]) -> list[int]:
    """The events after which memory rises again by a good part of what it falls by at most."""
    top = deepest = 0
    for level in levels[len(levels) // 3 :]:
        top = max(top, level)
        deepest = max(deepest, top - level)
    least = DEEP * deepest
    if not least:
        return []
    found: list[int] = []
    low = high = 0
    falling = False
    for number, level in enumerate(levels):
        if falling:
            low = number if level < levels[low] else low
            if level >= levels[low] + least:
                found.append(low)
                falling, high = False, number
        else:
            high = number if level > levels[high] else high
            if level <= levels[high] - least:
                falling, low = True, number
    return [*found, low] if falling else found


def _rising(levels: list[int]) -> list[int]:
    """The events of a few lows, below each of which memory never falls again, if these rise steadily; else none."""
    lows = _lows(levels)
    if len(lows) < LEAST_LOWS:
        return []
    found = [min(lows[int(part * len(lows)) :], key=lambda n: levels[n]) for part in LOOKS]
    rises = [levels[b] - levels[a] for a, b in pairwise(found)]
    total = sum(rises)
    steady = min(rises) > 0 and max(rises) <= JUMP * total and total >= GROWTH * levels[found[-1]]
    return found if steady else []


def _growth(first: Moment, last: Moment) -> Growth:
    total = last.allocated - first.allocated
    more = Counter(last.frames)
    more.subtract(first.frames)
    frames = tuple((name, size) for name, size in more.most_common(3) if size > 0.1 * total)
    return Growth(total, round(first.at_s, 6), round(last.at_s, 6), frames)
