"""Each construction of a process group: its number, members, name and line, said before it begins and when it ends.

Every rank has to construct the same groups in the same order; one that does not leaves the others waiting inside
``new_group``, where no collective tells of it. Groups made with ``use_local_synchronization`` are their members' matter
and are left out.

Private torch: ``distributed_c10d._new_group_with_tag``, through which every way to a new group goes, and the count of
groups that their names come from, ``distributed_c10d._world``; tried with 2.13.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from dtobs.events import Phase
from dtobs.probes import patches
from dtobs.probes.base import Probe
from dtobs.probes.rendezvous import caller

MAX_RECORDED = 2048
"""Constructions of a rank that are recorded: each may list thousands of members."""


class Constructions(Probe):
    """Wraps the functions that make process groups and destroy all of them."""

    name = "constructions"
    about_model = False

    def __init__(self) -> None:
        super().__init__()
        self._recorded = 0

    def install(self) -> None:
        if self.context.world_size == 1:
            return
        begin, end = self.context.guard(self, self._begin), self.context.guard(self, self._end)
        self.undo.callback(patches.around(distributed_c10d, "_new_group_with_tag", begin, end))
        self.around(dist, "destroy_process_group", self._dissolve, self._dissolved)

    def _begin(self, ranks: Sequence[int] | None = None, *_: Any, **given: Any) -> int | None:
        if given.get("use_local_synchronization") or self._recorded >= MAX_RECORDED:
            return None
        self._recorded += 1
        number = int(distributed_c10d._world.group_count)
        members = sorted(map(int, ranks)) if ranks is not None else list(range(dist.get_world_size()))
        name = str(given.get("group_desc") or "")
        self._say(number, ranks=members, name=name, site=caller(), begin_ns=time.monotonic_ns())
        return number

    def _end(self, number: int) -> None:
        self._say(number, state="done" if sys.exc_info()[0] is None else "failed")

    def _dissolve(self, group: Any = None) -> bool | None:
        """Whether all groups are destroyed between two steps; in the middle of one the training is broken off."""
        between = self.context.phase == Phase.NONE and not self.context.recorder.page.get("wait_since_ns")
        return True if between and group in (None, dist.GroupMember.WORLD) else None

    def _dissolved(self, _: bool) -> None:
        self.context.recorder.meta.add("process", dissolved_ns=time.monotonic_ns())

    def _say(self, number: int, **fields: Any) -> None:
        self.context.recorder.meta.add("construction", number=number, **fields)
        self.context.recorder.page.commit()
