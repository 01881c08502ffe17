"""Which reduction a call is: a sum, a mean, a maximum.

Private torch: an operator of ``c10d`` gets its ``ReduceOp`` in a box, ``torch.classes.c10d.ReduceOp``. From torch 2.10
on the box has a method ``op``. Before that nothing reads it, so what is reduced by is noted where a call begins: at the
methods of ``ProcessGroup``, which ``torch.distributed`` calls, and at the operators of ``_c10d_functional``. Of what
begins in C++ there is only DDP's reducer, and it sums. Tried with torch 2.6, 2.8 and 2.9; in 2.13 a test compares
what is noted with what the box says.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import ExitStack
from operator import methodcaller
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup, ReduceOp

from dtobs.probes import patches
from dtobs.probes.c10d_ops import REDUCE_NAMES, Interception

READABLE = bool(torch.classes.c10d.ReduceOp()._has_method("op"))
"""Whether this torch says what is in the box."""
_METHODS = (
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single",
)
_FUNCTIONAL = (
    "all_reduce",
    "all_reduce_",
    "all_reduce_coalesced",
    "all_reduce_coalesced_",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
)
_NUMBERS = {name: number for number, name in REDUCE_NAMES.items()}
_SUM = _NUMBERS["sum"]
_KINDS: Any = (ReduceOp, ReduceOp.RedOpType)


class ReduceOps:
    """Reads the number of a reduction, a key of `REDUCE_NAMES`, out of what an operator is called with.

    Where `readable` is false, `read` answers with what was noted on the thread it is called on.
    """

    def __init__(self, readable: bool = READABLE) -> None:
        self._readable = readable
        self._noted = threading.local()
        self.read: Callable[[Any], int] = methodcaller("op") if readable else self._read_noted

    def install(self, undo: ExitStack, guard: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Note reductions where nothing reads them; `undo` takes the notes' wrappers out again.

        `guard` keeps what fails in here away from the training.
        """
        if self._readable:
            return
        begin, end = guard(self._begin_method), guard(self._end)
        for name in _METHODS:
            if hasattr(ProcessGroup, name):
                undo.callback(patches.around(ProcessGroup, name, begin, end))
        functional = Interception("_c10d_functional")
        undo.callback(functional.undo)
        mask = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        for name in _FUNCTIONAL:
            overload = getattr(torch.ops._c10d_functional, name).default
            redispatch = overload._handle.redispatch_boxed
            functional.add(overload, functools.partial(self._functional, redispatch, mask))

    def _functional(self, redispatch: Any, mask: Any, keys: Any, tensor: Any, reduction: str, *rest: Any) -> Any:
        self._noted.number = _NUMBERS.get(reduction.lower(), -1)
        try:
            return redispatch(keys & mask, tensor, reduction, *rest)
        finally:
            self._end()

    def _begin_method(self, _group: ProcessGroup, *args: Any, **named: Any) -> bool:
        # A method takes options, or the operation itself; without either it sums.
        given = (getattr(value, "reduceOp", value) for value in (*args, *named.values()))
        found = (int(getattr(value, "op", value)) for value in given if isinstance(value, _KINDS))
        self._noted.number = next(found, _SUM)
        return True

    def _end(self, _token: bool = True) -> None:
        self._noted.number = _SUM

    def _read_noted(self, _box: Any) -> int:
        return getattr(self._noted, "number", _SUM)
