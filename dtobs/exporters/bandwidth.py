"""How fast collectives move their data, as nccl-tests count it: the bus bandwidth of groups within a host."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from dtobs.detectors.performance.transfers import Transfer, transfers
from dtobs.exporters.look import MonitorSnapshot
from dtobs.recording.meta import Group
from dtobs.timeline.kineto.names import bus_factor

MOST_RANKS, LAST_EVENTS = 16, 512
LEAST_CALLS = 4
LEAST_BYTES = 4 << 10
"""What is smaller takes the time of a message, not of its data."""
_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")


def bus_bandwidth(look: MonitorSnapshot) -> Iterator[tuple[tuple[str, ...], float]]:
    """By operation and kind of group, of the slowest such group. nccl-tests, doc/PERFORMANCE.md, has the factors."""
    here = [int(rank) for rank in look.pages["rank"]]
    if not 1 < len(here) <= MOST_RANKS:
        return
    groups = look.view.groups()
    calls: dict[tuple[str, int], list[Transfer]] = defaultdict(list)
    for (number, op), found in transfers(look.view, here, LAST_EVENTS).items():
        what = look.view.meta(groups[number].ranks[0]).ops.get(op)
        kind = next((known for known in _OPERATIONS if what is not None and what.op.startswith(known)), "")
        calls[kind, number] += [call for call in found if kind and call.nbytes >= LEAST_BYTES]
    slowest: dict[tuple[str, str], float] = {}
    for (kind, number), found in calls.items():
        seconds = math.fsum(call.seconds for call in found)  # alike in every Python
        if seconds and len(found) >= LEAST_CALLS:
            speed = sum(call.nbytes for call in found) / seconds * bus_factor(kind, len(groups[number].ranks))
            key = kind, _kind_of(groups[number])
            slowest[key] = min(speed, slowest.get(key, speed))
    yield from sorted(slowest.items())


def _kind_of(group: Group) -> str:
    """What groups alike are called; a number, which each of them has of its own, is no name."""
    name = group.description or group.name
    return name if name.strip("0123456789") and len(name) <= 64 else "unnamed"
