"""The gathered parameters of FSDP: private to torch, and the only place where the gradient before reduction exists.

Those of FSDP1 are the flat ones of `probes.flat`. Of FSDP2 this was tried with torch 2.11.0, 2.13.0 and 2.14.1; the
parameters may be distributed over a mesh that has other dimensions as well (``dp_mesh_dims``). Where a version keeps
its state elsewhere, `fsdp_parameters` finds none gathered, and local gradients of sharded parameters are
not measured (``local_norm`` stays NaN).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dtobs.probes.flat import Flat, flat_parameters
from dtobs.probes.layout import is_fsdp

try:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group
except ImportError:
    _fsdp_param_group = None  # type: ignore[assignment]

TRIED = ("2.11.0", "2.13.0", "2.14.1")

COPY_OUT: tuple[Any, str] | None = (
    (_fsdp_param_group, "foreach_all_gather_copy_out")
    if hasattr(_fsdp_param_group, "foreach_all_gather_copy_out")
    else None
)
"""What FSDP2 calls, with the result of an all-gather first, when a module is about to use its parameters."""


def gathered_event(result: Any) -> torch.Event | None:
    """The event after which an all-gather of FSDP2 is through; None where it is waited for as a Work."""
    event = getattr(result, "all_gather_event", None)
    return event if hasattr(event, "wait") else None


def fsdp_parameters(model: nn.Module) -> dict[int, nn.Parameter | None]:
    """id of each parameter that FSDP shards → what autograd sees in its place; None until it was first gathered.

    A flat parameter of FSDP1 is both.
    """
    found: dict[int, nn.Parameter | None] = {id(flat.parameter): flat.parameter for flat in flat_parameters(model)}
    for module in model.modules():
        if is_fsdp(module):
            for parameter in module.parameters():
                if isinstance(parameter, DTensor):
                    found.setdefault(id(parameter), None)
            for state in _states(module):
                sharded = getattr(state, "sharded_param", None)
                if sharded is not None:
                    found[id(sharded)] = getattr(state, "_unsharded_param", None)
    return found


@dataclass(frozen=True)
class Gathered:
    """How FSDP spreads one parameter: over `ranks`, in `parts` shards of its first dimension; `part` is this rank's.

    `find` gives what autograd sees in its place, None before it was first gathered; `waits` says whether that has a
    gradient which is still to be reduced. Neither keeps anything alive.
    """

    ranks: tuple[int, ...]
    parts: int
    part: int
    shape: tuple[int, ...]  #: of what autograd sees, on this rank
    find: Callable[[], nn.Parameter | None]
    waits: Callable[[], bool]
    along: frozenset[int] = frozenset()  #: mesh dimensions of a DTensor gradient over which FSDP adds it up


def fsdp_shards(model: nn.Module) -> dict[int, Gathered | None]:
    """id of each parameter that FSDP shards → how; None where this torch does not say, or along another dimension."""
    found: dict[int, Gathered | None] = {id(flat.parameter): _whole(flat) for flat in flat_parameters(model)}
    for module in model.modules():
        if is_fsdp(module):
            for state in _states(module):
                found[id(getattr(state, "sharded_param", None))] = _gathered(state)
    return found


def _whole(flat: Flat) -> Gathered:
    kept = weakref.ref(flat.parameter)
    return Gathered(flat.ranks, flat.parts, flat.part, (flat.length,), kept, lambda: False)


def _gathered(state: Any) -> Gathered | None:
    info, placement = getattr(state, "mesh_info", None), getattr(state, "fsdp_placement", None)
    mesh, size = getattr(info, "mesh", None), getattr(state, "_orig_size", None)
    if mesh is None or size is None or getattr(placement, "dim", None) != 0:
        return None
    along: frozenset[int] = getattr(state, "_dp_dim_indices", frozenset())  # none where its mesh is another one
    typed = getattr(state, "_spmd_grad_placements", ())  # what autograd makes is a plain tensor, which stands for these
    if any(made.is_partial() and dim not in along for dim, made in enumerate(typed)):
        return None
    kept = weakref.ref(state)

    def find() -> nn.Parameter | None:
        return getattr(kept(), "_unsharded_param", None)

    def waits() -> bool:
        """Of another type than it is reduced in, the gradient is kept beside the parameter."""
        beside = getattr(kept(), "unsharded_accumulated_grad", None)
        return beside is not None or getattr(find(), "grad", None) is not None

    ranks = tuple(sorted(int(r) for r in mesh.mesh.flatten().tolist()))
    parts, part = int(getattr(info, "shard_mesh_size", 1)), int(getattr(info, "shard_mesh_rank", 0))
    return Gathered(ranks, parts, part, tuple(size), find, waits, along)


def _states(module: Any) -> Iterator[Any]:
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [getattr(state, "_fsdp_param_group", None)]
    for group in groups:
        yield from getattr(group, "fsdp_params", ())
