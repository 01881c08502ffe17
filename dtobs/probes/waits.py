"""Where the host blocks on other ranks: ``Work.wait``, ``wait_tensor`` and DDP's buffer broadcast.

A `Work` says what kind of call it is: of that kind the thread's last one is taken for the one it waits for, also where
something else was issued since (``isend``, ``barrier``, then the wait of the first).

Private torch: ``torch._C._distributed_c10d.Work``, its ``_get_op_type`` with ``OpType``, and
``torch.distributed._broadcast_coalesced``; tried with 2.13. A version without types has what was issued last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Work

from dtobs.probes.base import Probe
from dtobs.probes.c10d_ops import Interception

_TYPES: Any = getattr(c10d, "OpType", None)
_NAMES = {
    "SEND": "send",
    **dict.fromkeys(("RECV", "RECVANYSOURCE"), "recv"),
    "BROADCAST": "broadcast",
    "ALLREDUCE": "all_reduce",
    "ALLREDUCE_COALESCED": "all_reduce_coalesced",
    "REDUCE": "reduce",
    **dict.fromkeys(("ALLGATHER", "_ALLGATHER_BASE"), "all_gather"),
    "ALLGATHER_COALESCED": "all_gather_coalesced",
    "GATHER": "gather",
    "SCATTER": "scatter",
    **dict.fromkeys(("REDUCE_SCATTER", "_REDUCE_SCATTER_BASE"), "reduce_scatter"),
    "REDUCE_SCATTER_TENSOR_COALESCED": "reduce_scatter_coalesced",
    **dict.fromkeys(("ALLTOALL", "ALLTOALL_BASE"), "all_to_all"),
    "BARRIER": "barrier",
}
_WHAT = {int(getattr(_TYPES, type_)): name for type_, name in _NAMES.items() if hasattr(_TYPES, type_)}
"""By the type of a `Work` the operator whose last call of a thread it is; of any other, it is what was issued last."""
_MESSAGES = ("send", "recv")
_REDUCTIONS = ("all_reduce", "all_reduce_coalesced", "reduce_scatter", "reduce_scatter_coalesced")


class Waits(Probe):
    """Marks the waiting, with the group and sequence number of what this thread issued last."""

    name = "waits"
    about_model = False

    def install(self) -> None:
        self._progress, self._last_issued = self.context.progress, self.context.last_issued
        functional = Interception("_c10d_functional")
        self.undo.callback(functional.undo)
        self.around(
            Work, "wait", self._begin_work if _WHAT and hasattr(Work, "_get_op_type") else self._begin, self._end
        )
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

    def _begin_work(self, work: Any, *_args: Any, **_named: Any) -> tuple[Any, tuple[int, int]]:
        name, progress = _WHAT.get(work._get_op_type(), "issued"), self._progress
        issued = self._last_issued(name)
        if name != "issued":
            progress.sends = name in _MESSAGES
        if name in _REDUCTIONS and (stepping := self.context.stepping) is not None:
            if self.context.reduced_in_step:
                self.context.reduced_in_step -= 1
            else:
                self.context.awaiting.add(stepping)
        progress.wait_begin(*issued)
        return work, issued

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
