"""How the model is spread over the ranks: which parameters are copies of which, and who reads different data.

What is not known stays empty: a detector that needs it then stays quiet.
"""

from __future__ import annotations

import gc
import inspect
import math
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from types import CellType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from dtobs.events import identify
from dtobs.probes.flat import flat_parameters
from dtobs.probes.megatron import megatron_groups
from dtobs.recording.meta import Parameter

_WRAPPERS = (
    "_orig_mod",
    "_checkpoint_wrapped_module",
    "_fsdp_wrapped_module",
    "_forward_module",  # of Lightning's Fabric
    "_dmp_wrapped_module",  # of TorchRec
)
# Ranks along a dimension with these words in its name read different samples ...
_DATA = frozenset({"replicate", "shard", "expert", "ep", "data", "dp", "ddp", "fsdp", "hsdp", "batch"})
# ... and along one with these they work on the same samples.
_MODEL = frozenset({"tensor", "tp", "pipeline", "pp", "context", "cp", "sequence", "seq", "sp", "model", "mp", "stage"})
_NEUTRAL = frozenset({"parallel", "dim", "mesh", "group"})
_STAGE = frozenset({"pipeline", "pp", "stage"})


@dataclass(frozen=True)
class ParameterLayout:
    """One rank's place. `data_ranks` are the ranks (this one included) that do the same work on different samples;
    empty when that is not known. `stage` is the pipeline stage. `dropout` counts active dropout modules. `along` is
    what the world's own group is for: the only dimension there is, as the mesh calls it; "" when that is not known.
    """

    kind: str  #: "ddp", "fsdp", "dtensor" or "plain"
    data_ranks: tuple[int, ...] = ()
    stage: int = 0
    coordinates: dict[str, int] = field(default_factory=dict)
    dropout: int = 0
    along: str = ""

    def to_json(self) -> dict[str, Any]:
        """The fields of the ``layout`` meta entry."""
        return asdict(self)


@dataclass(frozen=True)
class Named:
    """A tensor of the model in model order; `name` is without the names that wrappers add. `row` is its table row."""

    name: str
    tensor: torch.Tensor
    row: Parameter
    copy: tuple[int, int] = (0, 1)  #: which of how many known copies this rank has

    @property
    def share(self) -> float:
        """The part of its squared gradient norm that this rank counts, so that the shares of all ranks add up to
        the whole: 1 / copies. NaN when the number of copies is not known.
        """
        return 1.0 / int(self.row.replica.split(":")[1]) if self.row.replica else float("nan")


class Together(nn.ModuleList):
    """Several models that one session watches; the first keeps its names."""


class Bare(nn.Module):
    """Parameters that an optimizer trains and no module that is called has: a temperature, a tied weight, prompts.

    `parameters` by their names in tables.
    """

    def __init__(self, parameters: dict[str, Any]) -> None:
        super().__init__()
        self._parameters.update(parameters)  # a leaf that is no nn.Parameter can be trained as well


def model_tensors(model: nn.Module, replicas: Any = "auto") -> list[Named]:
    """Parameters, then the integer buffers of batch norms, each once, with the key of what they must be equal to.

    `replicas` as in `Context`: a ProcessGroup over which plain tensors are copies, None for nothing declared.
    """
    copies: dict[int, tuple[int, ...]] = {}
    seen: set[int] = set()
    if isinstance(replicas, dist.ProcessGroup):
        declared = tuple(dist.get_process_group_ranks(replicas))
        copies = {id(t): declared for t in (*model.parameters(), *nn.Module.buffers(model))}
    megatron = megatron_groups(model) if not copies else None
    if megatron is not None:
        copies = {id(p): megatron.copies(p) for p in model.parameters()}
    for ddp in wrappers(model):
        members = tuple(dist.get_process_group_ranks(ddp.process_group))
        ignored = set(getattr(ddp, "parameters_to_ignore", ()))
        for name, tensor in (*ddp.module.named_parameters(), *ddp.module.named_buffers()):
            if name not in ignored:
                copies[id(tensor)] = members
        if not ddp.broadcast_buffers:  # each rank counts its own forwards
            seen |= {id(buffer) for buffer in ddp.module.buffers()}
    flats = {id(p): flat for flat in flat_parameters(model) for p in flat.held}
    found: list[Named] = []
    for name, tensor in (*_walk(model, "", buffers=False), *_walk(model, "", buffers=True)):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            mine, flat = copies.get(id(tensor), ()), flats.get(id(tensor))
            mine = flat.copies if flat is not None and not mine else mine
            key = replica_key(tensor, mine)
            if flat is not None and flat.parts > 1:
                key = f"mesh:{len(mine)}:{_digest(flat.ranks)}/0.flat.{flat.part}"
            elif megatron is not None and megatron.shards(tensor):
                key = f"mesh:{len(mine)}:{_digest(megatron.duplicates)}/0.tp.{megatron.coordinates['tp']}"
            dtype = str(tensor.dtype).removeprefix("torch.")
            row = Parameter(name, tuple(tensor.shape), dtype, key)
            found.append(Named(name, tensor, row, _copy(tensor, mine)))
    return found


def replica_key(tensor: torch.Tensor, copies: tuple[int, ...] = ()) -> str:
    """``<kind>:<copies>:<which>``: ranks whose rows have equal names and keys hold equal values; "" when none do.

    A DTensor is a copy along the mesh dimensions on which it is replicated: the key then holds the mesh and where along
    the others this rank is. `copies` are the ranks with a copy of a tensor under DDP or by declaration.
    """
    number, where = 1, ""
    if isinstance(tensor, DTensor):
        mesh, place = tensor.device_mesh, tensor.device_mesh.get_coordinate()
        if place is None or any(p.is_partial() for p in tensor.placements):
            return ""
        replicated = [p.is_replicate() for p in tensor.placements]
        number = math.prod(mesh.size(dim) for dim, copied in enumerate(replicated) if copied)
        shards = [f"{d}.{p}.{place[d]}" for d, p in enumerate(tensor.placements) if not replicated[d]]
        ranks = mesh.mesh.flatten().tolist()
        where = f"mesh:{number}:{_digest(ranks)}/{'/'.join(shards)}"
        if len(ranks) == 1 and dist.get_world_size() > 1:
            where = f"copies:1:{_digest(ranks)}"  # a mesh of one rank shards nothing
    if copies:
        return f"copies:{len(copies) * number}:{_digest(copies)}"
    if where:
        return where
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return "own:1:"
    return ""


def _copy(tensor: torch.Tensor, copies: tuple[int, ...]) -> tuple[int, int]:
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate()
        if copies or coordinate is None:
            return 0, 1
        place, number = 0, 1
        for dim, placement in enumerate(tensor.placements):
            if placement.is_replicate():
                size = tensor.device_mesh.size(dim)
                place, number = place * size + coordinate[dim], number * size
        return place, number
    return (copies.index(dist.get_rank()), len(copies)) if copies else (0, 1)


def tokens_shared_by(model: nn.Module) -> list[int]:
    """The ranks on which an embedding of `model` takes its tokens to be the same; [] where it says nothing of that.

    A plan of tensor parallelism says so by ``input_layouts=Replicate()``, and DTensor takes its word. Private torch:
    the closures of the hooks that `distribute_module` makes, tried with 2.11 and 2.13; without them [].
    """
    for module in model.modules():
        for hook in module._forward_pre_hooks.values() if isinstance(module, nn.Embedding) else ():
            held = _closure(hook)
            prepares, mesh = held.get("input_fn"), held.get("device_mesh")
            layouts = prepares.args[0] if isinstance(prepares, partial) and prepares.args else None
            copies = isinstance(layouts, tuple) and layouts and all(isinstance(each, Replicate) for each in layouts)
            if isinstance(mesh, DeviceMesh) and copies:
                ranks: list[int] = mesh.mesh.flatten().tolist()
                return ranks
    return []


def _closure(hook: Any) -> dict[str, Any]:
    """What a function written in Python holds of the function around it, by name."""
    if not inspect.isfunction(hook):
        return {}
    cells = zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if cell != CellType()}


def wrappers(model: nn.Module) -> list[DistributedDataParallel]:
    """The DDP wrappers in `model`, outermost first, without those whose process group was destroyed."""
    found = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    return [ddp for ddp in found if ddp.process_group in distributed_c10d._world.pg_group_ranks]


def wrapper_around(module: nn.Module) -> nn.Module:
    """The DDP that was put around `module`, although the program named or called what is inside; else `module`.

    Looks at every object there is, once for a model: that takes some ten milliseconds.
    """
    if dist.is_initialized() and dist.get_world_size() > 1 and isinstance(module, nn.Module) and not wrappers(module):
        things = gc.get_objects()
        kinds = {kind for kind in set(map(type, things)) if issubclass(kind, DistributedDataParallel)}
        for each in things if kinds else ():
            inside = each._modules.get("module") if type(each) in kinds else None
            if inside is module or (inside is not None and _trains_no_more(inside, module)):
                return next(iter(wrappers(each)), module)
    return module


def _trains_no_more(outer: nn.Module, module: nn.Module) -> bool:
    """Whether `module` is a part of `outer` and has all that is trained of it: what peft wraps is generated with."""
    own = {id(p) for p in module.parameters()}
    trained = [p for p in outer.parameters() if p.requires_grad]
    return bool(trained) and all(id(p) in own for p in trained) and any(part is module for part in outer.modules())


def find_layout(model: nn.Module | None, mesh: DeviceMesh | None = None) -> ParameterLayout:
    """What can be known of this rank's place from the mesh, the DDP wrappers and the DTensors of `model`."""
    modules = list(model.modules()) if model is not None else []
    dropout = sum(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in modules)
    ddp = wrappers(model) if model is not None else []
    sharded = [p for p in model.parameters() if isinstance(p, DTensor)] if model is not None else []
    flats = flat_parameters(model) if model is not None else []
    sharding = bool(flats) or any(is_fsdp(m) for m in modules)
    kind = "ddp" if ddp else "fsdp" if sharding else "dtensor" if sharded else "plain"
    known = mesh or (max((_whole(p.device_mesh) for p in sharded), key=lambda m: m.ndim) if sharded else None)
    known = _told(known) if known is not None else None
    data: tuple[int, ...] = ()
    coordinates: dict[str, int] = {}
    if known is not None and known.mesh_dim_names:
        place = known.get_coordinate() or ()
        coordinates = dict(zip(known.mesh_dim_names, map(int, place), strict=False))
        data = data_ranks(known)
    elif known is not None and kind == "fsdp" and known.ndim == 1:
        data = tuple(known.mesh.flatten().tolist())
    if ddp and not data:
        data = tuple(dist.get_process_group_ranks(ddp[0].process_group))
    if flats and not data:
        data = flats[0].ranks
    groups = megatron_groups(model) if not data else None
    if groups is not None:
        data, coordinates = groups.data, groups.coordinates
    stage = next((c for name, c in coordinates.items() if _words(name) & _STAGE), 0)
    along = {"ddp": "data", "fsdp": "shard"}.get(kind, "")
    if known is not None and known.mesh_dim_names:
        wide = [name for name, size in zip(known.mesh_dim_names, known.shape, strict=True) if size > 1]
        along = wide[0] if len(wide) == 1 else along
    if groups is not None and len(coordinates) == 1:
        (along,) = coordinates
    return ParameterLayout(kind, data, stage, coordinates, dropout, along)


def _whole(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that `mesh` was cut out of, with the dimensions that `mesh` lacks; `mesh` itself where none is known.

    A tensor on ``whole["tp"]`` knows of the ranks beside it, and nothing of those that read other samples.
    """
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    resources: Any = getattr(sys.modules.get("torch.distributed.device_mesh"), "_mesh_resources", None)
    whole: DeviceMesh = resources.get_root_mesh(mesh) if hasattr(resources, "get_root_mesh") else mesh
    return whole


def _told(mesh: DeviceMesh) -> DeviceMesh:
    """`mesh`, or where its names do not say which ranks share samples, one that the program made of the same ranks.

    torchtitan makes one mesh "world" and several of it (``_unflatten``): that of the batch, of dense and of sparse
    layers. Of several the one with the fewest data ranks: another may have dimensions flattened into one. Looks at
    every object there is.
    """
    if mesh.mesh_dim_names is None or data_ranks(mesh):
        return mesh
    root, size = _whole(mesh), mesh.mesh.numel()
    made = [m for m in gc.get_objects() if issubclass(type(m), type(mesh)) and _whole(m) is root]
    telling = [m for m in made if m.mesh.numel() == size and data_ranks(m)]
    return min(telling, key=lambda m: (len(data_ranks(m)), -m.ndim), default=mesh)


def data_ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    """The ranks of `mesh` at this rank's place along every dimension whose ranks share samples.

    Empty when a dimension's name does not say what it is for.
    """
    place = mesh.get_coordinate()
    names = mesh.mesh_dim_names
    if place is None or names is None:
        return ()
    chosen: list[Any] = []
    for dim, name in enumerate(names):
        words = _words(name) - _NEUTRAL
        if mesh.size(dim) == 1 or (words and words <= _MODEL):
            chosen.append(place[dim])
        elif words and words <= _DATA:
            chosen.append(slice(None))
        else:
            return ()
    return tuple(sorted(int(r) for r in mesh.mesh[tuple(chosen)].flatten().tolist()))


def plain_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of `model` with names that do not say how it is wrapped."""
    return _walk(model, "", buffers=False)


def is_fsdp(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to `module` itself."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of `tensor`, sharing its memory, outside autograd."""
    # Not the other way round: DTensor's own dispatch costs fifty times as much.
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def common_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The groups of parameters that every rank has, whole or in parts; looked at in each step, so at one of each only.

    TorchRec gives whole tables to single ranks, as ShardedTensors in groups of their own, with a learning rate each.
    """
    groups: list[dict[str, Any]] = optimizer.param_groups
    return [g for g in groups if type(next(iter(g["params"]), None)).__name__ != "ShardedTensor"]


def is_partial(tensor: torch.Tensor, but: Collection[int] = ()) -> bool:
    """Whether `tensor` is a partial sum along some mesh dimension, other than those of `but`."""
    return isinstance(tensor, DTensor) and any(
        placement.is_partial() and dim not in but for dim, placement in enumerate(tensor.placements)
    )


def _walk(module: nn.Module, prefix: str, *, buffers: bool) -> Iterator[tuple[str, torch.Tensor]]:
    if buffers:
        if isinstance(module, _BatchNorm):
            for name, tensor in module.named_buffers(recurse=False):
                if not tensor.is_floating_point():
                    yield prefix + name, tensor
    else:
        for name, parameter in module.named_parameters(recurse=False):
            yield prefix + name, parameter
    for name, child in module.named_children():
        wrapped = name in _WRAPPERS or (
            name == "module" and isinstance(module, (DistributedDataParallel, nn.DataParallel))
        )
        if isinstance(module, Together):
            own = name != "0" and not isinstance(child, Bare)
            below = f"{prefix}model {int(name) + 1}." if own else prefix
        else:
            below = prefix if wrapped else f"{prefix}{name}."
        yield from _walk(child, below, buffers=buffers)


def module_name(model: nn.Module, module: nn.Module) -> str:
    """The name of `module` in `model` without the wrappers around it; "" where it is not in it, or is all of it."""
    found = next((name for name, each in model.named_modules() if each is module), "")
    if isinstance(model, (DistributedDataParallel, nn.DataParallel)):
        found = found.removeprefix("module").removeprefix(".")
    return ".".join(part for part in found.split(".") if part not in _WRAPPERS)


def _digest(ranks: Iterable[int]) -> str:
    return f"{identify(','.join(map(str, ranks))):08x}"


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z]+", name.lower())) - {""}
