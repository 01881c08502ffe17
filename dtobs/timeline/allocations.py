"""What fills a device's memory, from a snapshot of its allocator (`torch.cuda.memory._dump_snapshot`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dtobs.errors import TargetError

SCHEMA = "dtobs.memory/1"
TOP = 12
_CATEGORIES = (
    ("gradients", ("autograd/graph.py", "accumulate", "_backward.py")),
    ("optimizer", ("torch/optim/", "/optimizer", "apex/optimizers")),
    ("communication", ("torch/distributed/", "distributed_c10d", "_fsdp", "/nccl")),
    ("checkpoint", ("torch/serialization", "distributed/checkpoint")),
    ("activations", ("torch/nn/functional", "torch/nn/modules", "/flash_attn", "_inductor")),
)
_LIBRARY = ("torch/", "site-packages/", "dist-packages/", "lib/python", "<frozen", "<string>", "??")


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
    largest: list[tuple[int, str]] = field(default_factory=list)
    refused: tuple[int, int, str] | None = None  #: the last allocation that failed: its size, what was free, its place

    @property
    def fragmentation(self) -> float:
        """The share of the reserved memory that is free and stuck in segments in use."""
        return self.unusable / self.reserved if self.reserved else 0.0

    def to_json(self) -> dict[str, Any]:
        """A device in the JSON of `dtobs memory`."""
        return {
            "reserved_bytes": self.reserved,
            "allocated_bytes": self.allocated,
            "pending_bytes": self.pending,
            "inactive_bytes": self.inactive,
            "fragmentation": round(self.fragmentation, 6),
            "largest_free_bytes": self.largest_free,
            "categories": dict(self.categories.most_common()),
            "frames": [{"frame": name, "bytes": size} for name, size in self.frames.most_common(TOP)],
            "largest": [{"bytes": size, "frame": name} for size, name in self.largest[:TOP]],
            "out_of_memory": self.refused and dict(zip(("bytes", "free_bytes", "frame"), self.refused, strict=True)),
        }


def devices(snapshot: Any) -> dict[int, Device]:
    """Read a decoded snapshot. Raises TargetError when it is none."""
    segments = snapshot.get("segments") if isinstance(snapshot, dict) else snapshot
    if not isinstance(segments, list) or not all(isinstance(s, dict) and "blocks" in s for s in segments):
        raise TargetError("it is no snapshot of an allocator: it has no segments")
    found: dict[int, Device] = {}
    for segment in segments:
        device = found.setdefault(_size(segment.get("device")), Device())
        device.reserved += _size(segment.get("total_size"))
        blocks = segment["blocks"] if isinstance(segment["blocks"], list) else []
        used = free = 0
        for block in (b for b in blocks if isinstance(b, dict)):
            size, state = _size(block.get("size")), block.get("state")
            if state == "inactive":
                free += size
                device.largest_free = max(device.largest_free, size)
                continue
            used += size
            if state == "active_pending_free":
                device.pending += size
                continue
            device.allocated += size
            frames = list(_frames(block))
            where = _own(frames)
            device.frames[where] += size
            device.categories[_category(frames)] += size
            device.largest.append((size, where))
        device.inactive += free
        device.unusable += free if used else 0
        device.largest = sorted(device.largest, reverse=True)[:TOP]
    traces = snapshot.get("device_traces") if isinstance(snapshot, dict) else None
    for number, events in enumerate(traces if isinstance(traces, list) else ()):
        for event in reversed(events) if isinstance(events, list) else ():
            if isinstance(event, dict) and event.get("action") == "oom":
                place = _own(list(_frames(event)))
                refused = _size(event.get("size")), _size(event.get("device_free")), place
                found.setdefault(number, Device()).refused = refused
                break
    return found


def _size(value: Any) -> int:
    return value if type(value) is int and 0 <= value < 1 << 60 else 0


def _frames(block: dict[str, Any]) -> Iterator[str]:
    """The frames of an allocation, innermost first, in any of the layouts that torch has used."""
    frames = block.get("frames")
    history = block.get("history")
    if not frames and isinstance(history, list) and history and isinstance(history[0], dict):
        frames = history[0].get("frames")
    for frame in frames[:256] if isinstance(frames, list) else ():
        if isinstance(frame, dict):
            file, line, name = (str(frame.get(k, "?"))[:300] for k in ("filename", "line", "name"))
            yield f"{file}:{line} {name}"


def _own(frames: list[str]) -> str:
    """The innermost frame that is not a library's; where all are, the innermost."""
    own = (f for f in frames if not any(part in f for part in _LIBRARY))
    return next(own, frames[0] if frames else "(no stack recorded)")


def _category(frames: list[str]) -> str:
    for name, parts in _CATEGORIES:
        if any(part in frame for frame in frames for part in parts):
            return name
    return "other" if frames else "unknown"
