"""How fast collectives move their data, as nccl-tests count it: the bus bandwidth of groups within a host."""

from __future__ import annotations

from collections.abc import Iterator

from dtobs.detectors.performance.transfers import transfers
from dtobs.exporters.look import MonitorSnapshot
from dtobs.recording.meta import Group
from dtobs.timeline.kineto.names import bus_factor

MOST_RANKS, LAST_EVENTS = 16, 512
LEAST_CALLS = 4
_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")


def bus_bandwidth(look: MonitorSnapshot) -> Iterator[tuple[tuple[str, ...], float]]:
    """By operation and kind of group, of the slowest such group. nccl-tests, doc/PERFORMANCE.md, has the factors."""
    here = [int(rank) for rank in look.pages["rank"]]
    if not 1 < len(here) <= MOST_RANKS:
        return
    groups = look.view.groups()
    slowest: dict[tuple[str, str], float] = {}
    for (number, op), calls in transfers(look.view, here, LAST_EVENTS).items():
        group = groups[number]
        what = look.view.meta(group.ranks[0]).ops.get(op)
        kind = next((known for known in _OPERATIONS if what is not None and what.op.startswith(known)), "")
        seconds, nbytes = (sum(values) for values in zip(*calls, strict=True))
        if kind and seconds and nbytes and len(calls) >= LEAST_CALLS:
            speed = nbytes / seconds * bus_factor(kind, len(group.ranks))
            key = kind, _kind_of(group)
            slowest[key] = min(speed, slowest.get(key, speed))
    yield from sorted(slowest.items())


def _kind_of(group: Group) -> str:
    """What groups alike are called; a number, which each of them has of its own, is no name."""
    name = str(group)
    return name if name.strip("0123456789") and len(name) <= 64 else "unnamed"
