"""How long collectives take once all members have come, from the events of hosts that block on them.

The time of a transfer is from the arrival of the last member to the moment the first one goes on, so that late ranks do
not count. Devices, whose hosts do not wait, are seen by `dtobs trace`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from dtobs.events import Kind
from dtobs.recording.view import RunView


class Transfer(NamedTuple):
    """One call of all members: its time, and the payload of one of them."""

    seconds: float
    nbytes: float


def transfers(view: RunView, ranks: Iterable[int], last: int) -> dict[tuple[int, int], list[Transfer]]:
    """By number of group and of operation, the calls among the `last` events of each of `ranks` that all members of
    the group issued and waited for. The ranks must share a clock.
    """
    issued: dict[tuple[int, int, int], list[int]] = defaultdict(list)  # by group, operation and sequence number
    ended: dict[tuple[int, int], list[int]] = defaultdict(list)
    payload: dict[tuple[int, int, int], float] = {}
    for rank in ranks:
        events = view.tail_events(rank, last)
        for e in events[events["kind"] == Kind.COLLECTIVE]:
            call = int(e["group"]), int(e["op"]), int(e["seq"])
            issued[call].append(int(e["t_ns"]))
            payload[call] = float(e["value"])
        for e in events[(events["kind"] == Kind.WAIT_END) & (events["group"] != 0)]:
            ended[int(e["group"]), int(e["seq"])].append(int(e["t_ns"]))
    groups = view.groups()
    found: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    for (group, op, seq), begun in issued.items():
        ends = ended.get((group, seq), [])
        size = len(set(groups[group].ranks)) if group in groups else 0
        if size > 1 and len(begun) == size == len(ends) and min(ends) >= max(begun):
            found[group, op].append(Transfer((min(ends) - max(begun)) / 1e9, payload[group, op, seq]))
    return found
