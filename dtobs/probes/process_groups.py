"""Process groups as a recording names them: a number, the global ranks, and how many operations each has seen."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from dtobs.events import EXPOSED_ALONG, group_id
from dtobs.recording.meta import MetaWriter

_WORDS_OF = {
    "pipeline": {"pipeline", "pp", "stage"},
    "expert": {"expert", "ep"},
    "context": {"context", "cp", "sequence", "seq", "sp"},
    "tensor": {"tensor", "tp", "model", "mp"},
    "shard": {"shard", "fsdp"},
    "data": {"replicate", "data", "dp", "ddp", "hsdp", "batch"},
}
"""By dimension of `EXPOSED_ALONG`: a name with one of these words is of it; the first that fits counts."""
UNKNOWN = len(EXPOSED_ALONG)


def dimension(names: Iterable[str]) -> int:
    """The index in `EXPOSED_ALONG` of what the first telling of `names` says; `UNKNOWN` when none does."""
    for name in names:
        words = set(re.split(r"[^a-z]+", name.lower()))
        for along, known in _WORDS_OF.items():
            if words & known:
                return EXPOSED_ALONG.index(along)
    return UNKNOWN


class GroupState:
    """One group: its number and the counters of what was issued on it by this rank."""

    __slots__ = ("number", "on_host", "rank", "ranks", "received", "reference", "sent", "seq")

    def __init__(self, group: dist.ProcessGroup, number: int, ranks: tuple[int, ...]) -> None:
        # Weak: a strong one would keep the group's threads and sockets after destroy_process_group().
        self.reference: weakref.ref[Any] = weakref.ref(group)
        self.number, self.ranks = number, ranks
        self.rank = group.rank()
        self.seq = 0  #: of the last collective
        self.sent: dict[int, int] = {}  #: by global rank of the peer: sends issued
        self.received: dict[int, int] = {}
        #: Where the host's tensors have a backend of their own: what was issued on that, in an order of its own.
        self.on_host: GroupState | None = None

    def global_rank(self, rank: int) -> int:
        """The global rank of the group's member `rank`; -1 for a number that is none ("any source")."""
        return self.ranks[rank] if 0 <= rank < len(self.ranks) else -1


class GroupTable:
    """Finds the state of a group; defines its meta entry when it is first used."""

    def __init__(self, meta: MetaWriter) -> None:
        self._meta = meta
        self._states: dict[int, GroupState] = {}
        self._made: dict[tuple[str, tuple[int, ...]], int] = {}  # a destroyed world's names are given out again
        self.dimensions: dict[int, int] = {}  #: by number of the group: as `dimension` has it

    def state(self, group: dist.ProcessGroup) -> GroupState:
        """The state of `group`, by identity."""
        state = self._states.get(id(group))
        if state is None or state.reference() is not group:
            state = self._add(group)
        return state

    def number(self, group: dist.ProcessGroup) -> int:
        """The number of `group` in events."""
        return self.state(group).number

    def _add(self, group: dist.ProcessGroup) -> GroupState:
        self._states = {k: s for k, s in self._states.items() if s.reference() is not None}
        ranks = global_ranks(group)
        name = group.group_name
        again = self._made[name, ranks] = self._made.get((name, ranks), 0) + 1
        unique = f"{name}~{again}" if again > 1 else str(name)
        state = self._states[id(group)] = self._define(group, unique, ranks, group.name())
        beside = host_backend(group)
        if beside:
            state.on_host = self._define(group, f"{unique} ({beside})", ranks, beside, f" ({beside})")
        return state

    def _define(
        self, group: dist.ProcessGroup, unique: str, ranks: tuple[int, ...], backend: str, ending: str = ""
    ) -> GroupState:
        state = GroupState(group, group_id(unique, ranks), ranks)
        described = group.group_desc if group.group_desc != "undefined" else ""
        self._meta.define(
            "group",
            state.number,
            name=group.group_name + ending,
            ranks=list(ranks),
            description=described + ending if described else "",
            backend=backend,
        )
        # Groups that nobody named for a purpose are called "default_pg" or by a number.
        self.dimensions[state.number] = dimension((described,)) if described.startswith("mesh_") else UNKNOWN
        return state


def host_backend(group: dist.ProcessGroup) -> str:
    """The name of the backend that `group` has for the host's tensors alone; "" where it has one for all.

    Private torch: `ProcessGroup._device_types` and `_get_backend`, tried with torch 2.11 and 2.13; without them "".
    """
    types = {device.type for device in getattr(group, "_device_types", ())}
    if len(types) < 2 or "cpu" not in types:
        return ""
    names = {kind: group._get_backend(torch.device(kind)).name() for kind in types}
    return names["cpu"] if len(set(names.values())) > 1 else ""


def global_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Global ranks of `group` in group order; for a group torch does not list, its own numbering."""
    try:
        return tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError):
        return tuple(range(group.size()))
