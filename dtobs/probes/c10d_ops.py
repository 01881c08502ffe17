"""Every communicating operator of torch, found in the dispatcher, and a way to be called before each of them.

Private torch: the ``c10d::*`` operators and the BackendSelect dispatch key, which no one else uses for them.
Tried with torch 2.11 and 2.13. A kernel there runs on the calling thread for Python, C++, autograd and compiled callers
alike; the GIL is free while the operator itself runs. (A kernel on the backend's own key keeps the GIL and can
deadlock two threads.)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import ReduceOp, Work

NAMESPACE = "c10d"
_TENSORS = ("tensors", "tensor", "input_tensors", "input_list", "input_tensor", "inputs", "input")
_ROOTS = ("root_rank", "src", "dst")
_ALIASES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "allgather_base": "all_gather",
    "allgather_into_tensor": "all_gather",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "recv_any_source": "recv",
}
_NOT_COMMUNICATING = {"check_for_nan"}
REDUCE_NAMES: dict[int, str] = {
    int(value): name.lower()  # type: ignore[call-overload]
    for name, value in ReduceOp.RedOpType.__members__.items()
}
"""Reduce operations by their number, in lower case."""


@dataclass(frozen=True)
class Operator:
    """One operator: its name in a recording and where its arguments are. -1: it has no such argument.

    `payload` is the position of the tensors whose shapes every rank must agree on (a tensor, a list, or a list of
    lists); `scale_by_group` says that the payload moved is that times the group's size.
    """

    overload: torch._ops.OpOverload
    name: str
    payload: int
    group: int
    reduce_op: int
    root: int
    tag: int
    is_async: int
    blocking: bool  #: returns only when its peers have answered
    scale_by_group: bool

    @property
    def peer_to_peer(self) -> bool:
        """A send or a receive."""
        return self.name in ("send", "recv")

    @property
    def same_shapes(self) -> bool:
        """Whether every rank of the group must call it with the same shapes."""
        return self.name not in ("all_to_all", "barrier", "monitored_barrier")


def canonical_name(operator: str) -> str:
    """``c10d::_allgather_base_`` → ``all_gather``: the name users know, coalesced forms keep their ending."""
    name = operator.partition("::")[2].partition(".")[0].strip("_")
    stem, coalesced, _ = name.partition("_coalesced")
    return _ALIASES.get(stem, stem) + coalesced


def discover() -> list[Operator]:
    """The operators of this torch that take a process group."""
    found = []
    for qualified in sorted(torch._C._dispatch_get_all_op_names()):
        space, _, rest = qualified.partition("::")
        name, _, overload = rest.partition(".")
        if space != NAMESPACE or name in _NOT_COMMUNICATING:
            continue
        entry = getattr(getattr(torch.ops.c10d, name), overload or "default")
        arguments = [a.name for a in entry._schema.arguments]
        if "process_group" in arguments:
            found.append(_describe(entry, qualified, arguments))
    return found


def _describe(entry: torch._ops.OpOverload, qualified: str, arguments: list[str]) -> Operator:
    def position(*names: str) -> int:
        return next((arguments.index(n) for n in names if n in arguments), -1)

    name = canonical_name(qualified)
    outputs = [i for i, a in enumerate(arguments) if re.match(r"output", a)]
    # Only the root of a scatter has inputs, and a rank's share of a reduce-scatter is its output.
    by_output = name.startswith(("scatter", "reduce_scatter")) and outputs
    return Operator(
        overload=entry,
        name=name,
        payload=outputs[0] if by_output else position(*_TENSORS),
        group=position("process_group"),
        reduce_op=position("reduce_op"),
        root=position(*_ROOTS),
        tag=position("tag"),
        is_async=position("async_op"),
        blocking="Work" not in str(entry._schema).partition("->")[2],
        scale_by_group=name.startswith(("all_gather", "reduce_scatter")),
    )


def work_of(result: Any) -> Work | None:
    """The Work in what an operator returned. None where it ran on the caller's stream: NCCL, without `async_op`."""
    boxed = result[-1] if isinstance(result, (tuple, list)) else result
    return None if boxed is None else Work.unbox(boxed)


class Interception:
    """Kernels of ours in front of the operators of one namespace; `undo` takes all of them out again."""

    def __init__(self, namespace: str = NAMESPACE) -> None:
        self._namespace = namespace
        self._library: Any = None

    def install(self, operators: list[Operator], make: Callable[[Operator, Any, Any], Callable[..., Any]]) -> None:
        """Put ``make(operator, redispatch, mask)`` in front of each operator.

        It is called with the key set and the positional arguments, and goes on by ``redispatch(keys & mask, *args)``.
        """
        mask = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        for operator in operators:
            self.add(operator.overload, make(operator, operator.overload._handle.redispatch_boxed, mask))

    def add(self, overload: torch._ops.OpOverload, kernel: Callable[..., Any]) -> None:
        """Put one kernel in front of one operator of the namespace."""
        if self._library is None:
            self._library = torch.library.Library(self._namespace, "IMPL")  # type: ignore[no-untyped-call]
        self._library.impl(overload, kernel, "BackendSelect", with_keyset=True)

    def undo(self) -> None:
        """Unregister every kernel."""
        library, self._library = self._library, None
        if library is not None:
            library._destroy()
