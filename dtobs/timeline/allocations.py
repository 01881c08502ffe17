"""What fills a device's memory, from a snapshot of its allocator (`torch.cuda.memory._dump_snapshot`)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from dtobs.errors import TargetError
from dtobs.timeline.allocation_history import AllocationHistory, address_of, history, size_of
from dtobs.timeline.allocation_sites import AllocationSite, site

SCHEMA = "dtobs.memory/1"
TOP = 12
_PENDING = ("active_pending_free", "active_awaiting_free")


@dataclass
class Device:
    """One device's memory in bytes."""

    reserved: int = 0  #: taken from the driver
    allocated: int = 0
    pending: int = 0  #: freed, and another stream may still use it
    inactive: int = 0
    unusable: int = 0  #: of the inactive, in segments that also hold something: cannot go back to the driver
    largest_free: int = 0
    frames: Counter[str] = field(default_factory=Counter)
    categories: Counter[str] = field(default_factory=Counter)
    largest: Counter[tuple[int, str]] = field(default_factory=Counter)  #: size and place → how many
    private: int = 0  #: reserved for pools of their own, as CUDA graphs have
    expandable: bool = False  #: segments grow in place, so that free pieces of several come together
    history: AllocationHistory = field(default_factory=AllocationHistory)

    @property
    def fragmentation(self) -> float:
        """The share of the reserved memory that is free and stuck in segments in use."""
        return self.unusable / self.reserved if self.reserved else 0.0

    def to_json(self) -> dict[str, Any]:
        """A device in the JSON of `dtobs memory`."""
        past = self.history
        return {
            "reserved_bytes": self.reserved,
            "allocated_bytes": self.allocated,
            "pending_bytes": self.pending,
            "inactive_bytes": self.inactive,
            "fragmentation": round(self.fragmentation, 6),
            "largest_free_bytes": self.largest_free,
            "categories": dict(self.categories.most_common()),
            "frames": [{"frame": name, "bytes": size} for name, size in self.frames.most_common(TOP)],
            "largest": [
                {"bytes": size, "frame": name, "blocks": self.largest[size, name]}
                for size, name in sorted(self.largest, reverse=True)[:TOP]
            ],
            "private_pool_bytes": self.private,
            "out_of_memory": past.refusal.to_json() if past.refusal else None,
            "history_s": round(past.seconds, 6),
            "peak": past.peak.to_json() if past.peak else None,
            "growth": past.growth.to_json() if past.growth else None,
        }


def devices(snapshot: Any) -> dict[int, Device]:
    """Read a decoded snapshot. Raises TargetError when it is none."""
    segments = snapshot.get("segments") if isinstance(snapshot, dict) else snapshot
    if not isinstance(segments, list) or not all(isinstance(s, dict) and "blocks" in s for s in segments):
        raise TargetError("it is no snapshot of an allocator: it has no segments")
    found: dict[int, Device] = {}
    held: dict[int, dict[int, tuple[int, AllocationSite]]] = {}
    for segment in segments:
        number = size_of(segment.get("device"))
        _take(segment, found.setdefault(number, Device()), held.setdefault(number, {}))
    traces = snapshot.get("device_traces") if isinstance(snapshot, dict) else None
    for number, events in enumerate(traces if isinstance(traces, list) else ()):
        if isinstance(events, list) and events:
            device = found.get(number, Device())
            device.history = history(events, held.get(number, {}), device.reserved)
            if device.reserved or device.history.curve:
                found[number] = device
    return found


def _take(segment: dict[str, Any], device: Device, held: dict[int, tuple[int, AllocationSite]]) -> None:
    """Add one segment to what is known of its device, and to what it holds by address."""
    total, address = size_of(segment.get("total_size")), address_of(segment.get("address")) or 0
    device.reserved += total
    if segment.get("segment_pool_id", (0, 0)) not in ((0, 0), [0, 0], None):
        device.private += total
    device.expandable |= segment.get("is_expandable") is True
    used = free = 0
    for block in (b for b in (segment["blocks"] if isinstance(segment["blocks"], list) else ()) if isinstance(b, dict)):
        size, state = size_of(block.get("size")), block.get("state")
        begin = address_of(block.get("address")) or address
        address = begin + size
        if state == "inactive":
            free += size
            device.largest_free = max(device.largest_free, size)
            continue
        used += size
        where = site(block)
        held[begin] = (size_of(block.get("requested_size")) or size, where)
        if state in _PENDING:
            device.pending += size
            continue
        device.allocated += size
        device.frames[where.place] += size
        device.categories[where.category] += size
        device.largest[size, where.place] += 1
    device.inactive += free
    device.unusable += free if used else 0
