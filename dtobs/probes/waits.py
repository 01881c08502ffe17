"""Where the host blocks on other ranks: ``Work.wait``, ``wait_tensor`` and DDP's buffer broadcast.

Private torch: ``torch._C._distributed_c10d.Work`` and ``torch.distributed._broadcast_coalesced``; tried with 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from dtobs.probes.base import Context, Probe
from dtobs.probes.c10d_ops import Interception
from dtobs.probes.patches import Patches
from dtobs.probes.progress import Progress


class Waits(Probe):
    """Marks the waiting. `last_issued` is the group and sequence number of what this thread issued last."""

    name = "waits"
    about_model = False

    def __init__(self, progress: Progress, last_issued: Callable[[], tuple[int, int]]) -> None:
        super().__init__()
        self._progress = progress
        self._last_issued = last_issued
        self._patches = Patches()
        self._functional = Interception("_c10d_functional")

    def install(self, context: Context) -> None:
        self._begin = context.guard(self, self._wait_begin)
        self._end = context.guard(self, self._wait_end)
        self._patches.replace(Work, "wait", self._around)
        self._patches.replace(dist, "_broadcast_coalesced", self._around)
        self._functional.add(torch.ops._c10d_functional.wait_tensor.default, self._functional_wait())

    def remove(self) -> None:
        self._patches.undo()
        self._functional.undo()

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        begin, end = self._begin, self._end

        def wait(*args: Any, **kwargs: Any) -> Any:
            begin()
            try:
                return original(*args, **kwargs)
            finally:
                end()

        wait.__doc__ = original.__doc__
        return wait

    def _functional_wait(self) -> Callable[..., Any]:
        begin, end = self._begin, self._end
        redispatch = torch.ops._c10d_functional.wait_tensor.default._handle.redispatch_boxed
        mask = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

        def kernel(keys: Any, tensor: torch.Tensor) -> Any:
            begin()
            try:
                return redispatch(keys & mask, tensor)
            finally:
                end()

        return kernel

    def _wait_begin(self) -> None:
        self._progress.wait_begin(*self._last_issued())

    def _wait_end(self) -> None:
        self._progress.wait_end(*self._last_issued())
