"""Where the host blocks on other ranks: ``Work.wait``, ``wait_tensor`` and DDP's buffer broadcast.

Private torch: ``torch._C._distributed_c10d.Work`` and ``torch.distributed._broadcast_coalesced``; tried with 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from dtobs.probes.base import Probe
from dtobs.probes.c10d_ops import Interception


class Waits(Probe):
    """Marks the waiting, with the group and sequence number of what this thread issued last."""

    name = "waits"
    about_model = False

    def install(self) -> None:
        self._progress, self._last_issued = self.context.progress, self.context.last_issued
        functional = Interception("_c10d_functional")
        self.undo.callback(functional.undo)
        self.around(Work, "wait", self._begin, self._end)
        self.around(dist, "_broadcast_coalesced", self._begin, self._end)
        functional.add(torch.ops._c10d_functional.wait_tensor.default, self._functional_wait())

    def _functional_wait(self) -> Callable[..., Any]:
        begin, end = self.guard(self._begin), self.guard(self._end)
        redispatch = torch.ops._c10d_functional.wait_tensor.default._handle.redispatch_boxed
        mask = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

        def kernel(keys: Any, tensor: torch.Tensor) -> Any:
            token = begin(tensor)
            try:
                return redispatch(keys & mask, tensor)
            finally:
                if token is not None:
                    end(token)

        return kernel

    def _begin(self, thing: Any, *_args: Any, **_named: Any) -> tuple[Any, tuple[int, int]]:
        issued = self._last_issued()
        self._progress.wait_begin(*issued)
        return thing, issued

    def _end(self, token: tuple[Any, tuple[int, int]]) -> None:
        thing, issued = token
        self._progress.wait_end(*issued)
        conservation = self.context.conservation
        if conservation is not None and (conservation.waiting or conservation.under_way):
            conservation.waited(thing)
