"""What goes into a collective and what comes out of it, cut into parts that ranks can compare.

A part is one contiguous piece of memory on its way from a source to a target, both ranks within the group; -1 stands
for all of them. What one rank puts in and another gets out carry the same source and target, and are found again by
these alone. Of a group of many ranks, the parts of a few are chosen by the number of the call: the same on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dtobs.recording.laws import ReductionRule

PARTS = 8
"""Parts of one call that a rank looks at, at most."""
_EVERYONE = -1
_RULES = {"sum": ReductionRule.SUM, "avg": ReductionRule.AVG, "max": ReductionRule.MAX, "min": ReductionRule.MIN}
_SUMMED = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32})


@dataclass(frozen=True)
class MessagePart:
    """`memory` is one-dimensional; `item` counts the tensors of a coalesced call."""

    source: int
    target: int
    item: int
    memory: torch.Tensor


@dataclass(frozen=True)
class Parts:
    """Both ends of one call, as this rank holds them; `rule` says what is conserved."""

    rule: ReductionRule
    put_in: list[MessagePart]
    came_out: list[MessagePart]


@dataclass(frozen=True)
class Seat:
    """Where this rank sits in a call: its place in a group of `size`, and the call's number in it.

    With `everything`, no part and no tensor of the call is left out.
    """

    rank: int
    size: int
    seq: int
    everything: bool

    def chosen(self) -> list[int]:
        """The ranks whose parts are looked at, the same on every rank."""
        if self.everything or self.size <= PARTS:
            return list(range(self.size))
        first = self.seq * PARTS % self.size
        return [(first + n) % self.size for n in range(PARTS)]

    def items(self, count: int) -> list[int]:
        """Which tensors of a coalesced call are looked at."""
        return list(range(count)) if self.everything or count <= 1 else [self.seq % count]


def cut(operator: str, reduction: str, root: int, args: Sequence[Any], seat: Seat) -> Parts | None:
    """The parts of one call of ``c10d::operator``; None where nothing is known to be conserved, or memory has gaps.

    `reduction` is the lower-case name of the reduce operation, "" for none; `root` the root or peer in the group.
    """
    if operator in _REDUCTIONS:
        put_in, came_out = _REDUCTIONS[operator](args, root, seat)
        rule = _RULES.get(reduction, ReductionRule.SAME)
        if any(t is not None and t.dtype not in _SUMMED for *_, t in put_in):
            rule = ReductionRule.SAME
        if rule == ReductionRule.SAME and not operator.startswith("allreduce"):
            return None  # each rank gets something else, and what it should be is not known
    elif operator in _COPIES:
        put_in, came_out = _COPIES[operator](args, root, seat)
        rule = ReductionRule.COPY
    else:
        return None
    sides: list[list[MessagePart]] = []
    for side in (put_in, came_out):
        parts: list[MessagePart] = []
        for source, target, item, tensor in side:
            memory = dense(tensor)
            if memory is None:
                return None
            if memory.numel():
                parts.append(MessagePart(source, target, item, memory))
        sides.append(parts)
    return Parts(rule, *sides)


def dealt(args: Sequence[Any], size: int) -> tuple[list[int], list[int]]:
    """How many elements an all-to-all of a group of `size` sends to each rank, and takes from each."""
    if type(args[0]) is list:
        return [t.numel() for t in args[1]], [t.numel() for t in args[0]]
    return _elements(args[1], args[4], size), _elements(args[0], args[3], size)


def _elements(tensor: torch.Tensor, rows: Sequence[int], size: int) -> list[int]:
    width = math.prod(tensor.shape[1:])
    return [each * width for each in rows] or [tensor.numel() // size] * size


def dense(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The memory of a tensor as one row, in the order in which it is sent; None where it has gaps or is no memory."""
    if tensor is None or type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return None
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() and reach != tensor.numel():
        return None
    held = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return held.as_strided((held.numel(),), (1,), held.storage_offset())


_Side = list[tuple[int, int, int, torch.Tensor | None]]
"""Source, target, item, tensor."""
_Cutter = Callable[[Sequence[Any], int, Seat], tuple[_Side, _Side]]


def _all_reduce(args: Sequence[Any], _root: int, seat: Seat) -> tuple[_Side, _Side]:
    both: _Side = [(_EVERYONE, _EVERYONE, n, args[0][n]) for n in seat.items(len(args[0]))]
    return both, both


def _reduce(args: Sequence[Any], root: int, _seat: Seat) -> tuple[_Side, _Side]:
    both: _Side = [(_EVERYONE, root, 0, args[0][0])]
    return both, both if _seat.rank == root else []


def _reduce_scatter(args: Sequence[Any], _root: int, seat: Seat) -> tuple[_Side, _Side]:
    return _scattered(args[0][0], args[1][0], 0, seat)


def _reduce_scatter_base(args: Sequence[Any], _root: int, seat: Seat) -> tuple[_Side, _Side]:
    return _scattered(args[0], _equal(args[1], seat.size), 0, seat)


def _reduce_scatter_coalesced(args: Sequence[Any], _root: int, seat: Seat) -> tuple[_Side, _Side]:
    sides = [_scattered(args[0][n], _equal(args[1][n], seat.size), n, seat) for n in seat.items(len(args[0]))]
    return [each for side, _ in sides for each in side], [each for _, side in sides for each in side]


def _scattered(
    output: torch.Tensor, inputs: Sequence[torch.Tensor | None], item: int, seat: Seat
) -> tuple[_Side, _Side]:
    chosen = seat.chosen()
    put_in: _Side = [(_EVERYONE, target, item, inputs[target]) for target in chosen]
    return put_in, [(_EVERYONE, seat.rank, item, output)] if seat.rank in chosen else []


def _broadcast(args: Sequence[Any], root: int, seat: Seat) -> tuple[_Side, _Side]:
    side: _Side = [(root, _EVERYONE, n, args[0][n]) for n in seat.items(len(args[0]))]
    return (side, []) if seat.rank == root else ([], side)


def _all_gather(args: Sequence[Any], _root: int, seat: Seat) -> tuple[_Side, _Side]:
    return _gathered(args[0][0], args[1][0], 0, seat)


def _all_gather_base(args: Sequence[Any], _root: int, seat: Seat) -> tuple[_Side, _Side]:
    return _gathered(_equal(args[0], seat.size), args[1], 0, seat)


def _all_gather_coalesced(args: Sequence[Any], _root: int, seat: Seat) -> tuple[_Side, _Side]:
    sides = [_gathered(_equal(args[0][n], seat.size), args[1][n], n, seat) for n in seat.items(len(args[0]))]
    return [each for side, _ in sides for each in side], [each for _, side in sides for each in side]


def _gathered(
    outputs: Sequence[torch.Tensor | None], given: torch.Tensor, item: int, seat: Seat
) -> tuple[_Side, _Side]:
    chosen = seat.chosen()
    came_out: _Side = [(source, _EVERYONE, item, outputs[source]) for source in chosen]
    return [(seat.rank, _EVERYONE, item, given)] if seat.rank in chosen else [], came_out


def _scatter(args: Sequence[Any], root: int, seat: Seat) -> tuple[_Side, _Side]:
    chosen = seat.chosen()
    put_in: _Side = [(root, target, 0, args[1][0][target]) for target in chosen] if seat.rank == root else []
    return put_in, [(root, seat.rank, 0, args[0][0])] if seat.rank in chosen else []


def _gather(args: Sequence[Any], root: int, seat: Seat) -> tuple[_Side, _Side]:
    chosen = seat.chosen()
    came_out: _Side = [(source, root, 0, args[0][0][source]) for source in chosen] if seat.rank == root else []
    return [(seat.rank, root, 0, args[1][0])] if seat.rank in chosen else [], came_out


def _all_to_all(args: Sequence[Any], _root: int, seat: Seat) -> tuple[_Side, _Side]:
    return _exchanged(args[0], args[1], seat)


def _all_to_all_base(args: Sequence[Any], _root: int, seat: Seat) -> tuple[_Side, _Side]:
    return _exchanged(_split(args[0], args[3], seat.size), _split(args[1], args[4], seat.size), seat)


def _exchanged(
    outputs: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor | None], seat: Seat
) -> tuple[_Side, _Side]:
    me, size = seat.rank, seat.size  # the pairs that lie equally far apart, so that each rank has as many
    put_in: _Side = [(me, (me + far) % size, 0, inputs[(me + far) % size]) for far in seat.chosen()]
    return put_in, [((me - far) % size, me, 0, outputs[(me - far) % size]) for far in seat.chosen()]


def _send(args: Sequence[Any], peer: int, seat: Seat) -> tuple[_Side, _Side]:
    return [(seat.rank, peer, 0, args[0][0])], []


def _receive(args: Sequence[Any], peer: int, seat: Seat) -> tuple[_Side, _Side]:
    return [], [(peer, seat.rank, 0, args[0][0])]


def _equal(tensor: torch.Tensor, count: int) -> Sequence[torch.Tensor | None]:
    memory = dense(tensor)
    if memory is None or memory.numel() % count:
        return [None] * count
    return memory.view(count, -1).unbind(0)


def _split(tensor: torch.Tensor, rows: Sequence[int], count: int) -> Sequence[torch.Tensor | None]:
    if not rows:
        return _equal(tensor, count)
    memory = dense(tensor)
    if memory is None or not tensor.is_contiguous():
        return [None] * count
    width = math.prod(tensor.shape[1:]) * (2 if tensor.is_complex() else 1)
    return torch.split(memory, [each * width for each in rows])


_REDUCTIONS: dict[str, _Cutter] = {
    "allreduce_": _all_reduce,
    "allreduce_coalesced_": _all_reduce,
    "reduce_": _reduce,
    "reduce_scatter_": _reduce_scatter,
    "_reduce_scatter_base_": _reduce_scatter_base,
    "reduce_scatter_tensor_coalesced_": _reduce_scatter_coalesced,
}
_COPIES: dict[str, _Cutter] = {
    "broadcast_": _broadcast,
    "allgather_": _all_gather,
    "_allgather_base_": _all_gather_base,
    "allgather_into_tensor_coalesced_": _all_gather_coalesced,
    "scatter_": _scatter,
    "gather_": _gather,
    "alltoall_": _all_to_all,
    "alltoall_base_": _all_to_all_base,
    "send": _send,
    "recv_": _receive,
}
