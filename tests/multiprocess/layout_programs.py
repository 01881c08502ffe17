"""Ranks that say what they see of a layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import dtobs
from dtobs.probes.flat import flat_parameters
from dtobs.probes.layout import find_layout, model_tensors, wrapper_around
from dtobs.recording.view import load_run


class Block(nn.Module):
    """Norm and two matrices: what tensor parallelism does to a transformer's block, in small."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32, bias=False)
        self.down = nn.Linear(32, 16, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(x_BTD)))


def split_sequences(rank: int, world_size: int, run_dir: Path, own: bool) -> tuple[float, float]:
    """Context parallel as torch does it: sequences are split in the loop. With `own`, each rank splits other ones.

    What the model holds is split after them, by a call of its own.

    Returns the elements that the last step's record tells, and those of this rank's part of a sequence.
    """
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(50, 8), nn.Dropout(0.1), nn.Linear(8, 50))
    model.register_buffer("places", torch.arange(32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with dtobs.attach(model, optimizer, run_dir=run_dir, monitor=False) as session:
        for step in range(24):
            seed = 100 * step + (rank if own else 0)
            tokens = torch.randint(50, (2, 32), generator=torch.Generator().manual_seed(seed))
            angles = torch.linspace(0, 1, 32).repeat(4, 1)
            with (
                context_parallel(mesh, buffers=[tokens, angles], buffer_seq_dims=[1, 1]),
                context_parallel(mesh, buffers=[model.places], buffer_seq_dims=[0]),
            ):
                for half in tokens.chunk(2):
                    model(half).square().mean().backward()
                part = tokens.numel()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad(), context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[1]):
                model(tokens)
        session.close()
    return float(load_run(run_dir).rank_steps(rank)["input_elements"][-1]), part


def train_tensor_parallel(rank: int, world_size: int, run_dir: Path, nan: bool) -> list[tuple[str, str]]:
    """Sequence parallel over all ranks: every rank reads the same; the norm's gradients are partial sums."""
    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tensor",))
    model = parallelize_module(
        Block(),
        mesh,
        {
            "norm": SequenceParallel(),
            "up": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        },
    )
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Replicate())})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with dtobs.attach(model, optimizer, run_dir=run_dir, mesh=mesh, monitor=False) as session:
        for step in range(24):
            inputs = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(step))
            session.batch(inputs=inputs)
            loss = model(inputs[:, rank * 4 : rank * 4 + 4]).square().mean()
            if nan and step == 20:
                loss = loss * float("nan")
            loss.backward()
            for parameter in model.parameters():
                gradient = parameter.grad
                if any(p.is_partial() for p in gradient.placements):
                    parameter.grad = gradient.redistribute(placements=[Replicate()])
            optimizer.step()
            optimizer.zero_grad()
    return [(t.name, t.row.replica) for t in model_tensors(model)]


def describe_mesh(rank: int, world_size: int, names: tuple[str, ...], shape: tuple[int, ...]) -> dict[str, Any]:
    """The layout of the last rank of a large world that exists in one process only."""
    world = int(torch.tensor(shape).prod())
    dist.init_process_group("fake", rank=world - 1, world_size=world)
    layout = find_layout(nn.Linear(2, 2), init_device_mesh("cpu", shape, mesh_dim_names=names))
    return layout.to_json()


def train_by_hand(rank: int, world: int, folder: Path, how: str, wrong: str) -> dict[str, str]:
    """A model of which rank r holds half r % 2, gradients averaged over the ranks with the same half; its copies.

    `how` the gradients are averaged: one by one, from hooks, in one buffer, in two "buffers", or one by one and "shared
    out": each rank steps some parameters and sends them. `wrong`: "start", "flip", "data", "not sent", "scaled",
    "largest", "not reduced" or "".
    """
    halves = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    group = halves[rank % 2]
    torch.manual_seed(rank if wrong == "start" else rank % 2)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    params = list(model.parameters())
    mine = params[rank // 2 :: 2] if how == "shared out" else params
    optimizer = torch.optim.Adam(mine, lr=1e-3)

    operation = dist.ReduceOp.MAX if wrong == "largest" else dist.ReduceOp.SUM

    def average(parameter: torch.Tensor) -> None:
        dist.all_reduce(parameter.grad, operation, group=group)

    for parameter in params if how == "hooks" else ():
        parameter.register_post_accumulate_grad_hook(average)
    inputs = torch.Generator().manual_seed(rank % 2 if wrong == "data" else rank)
    with dtobs.attach(model, optimizer, run_dir=folder, monitor=False) as session:
        for step in range(1, 31):
            session.step(step)
            dist.all_reduce(torch.ones(8, 6))  # as many elements as a weight has, over all
            optimizer.zero_grad()
            model(torch.randn(4, 6, generator=inputs)).square().mean().backward()
            if wrong == "not reduced" and step >= 20:
                pass
            elif how in ("one by one", "shared out"):
                for parameter in params:
                    average(parameter)
            elif how in ("buffer", "buffers"):
                for some in (params[:1], params[1:]) if how == "buffers" else (params,):
                    flat = torch.cat([p.grad.flatten() for p in some])
                    dist.all_reduce(flat, group=group)
                    torch.nn.utils.vector_to_parameters(flat, [p.grad for p in some])
            if wrong == "scaled" and step >= 20 and rank == 2:
                params[0].grad *= 3
            if wrong == "flip" and step == 20 and rank == 2:
                params[2].data[1, 2] += 0.5
            optimizer.step()
            for number, parameter in enumerate(params if how == "shared out" else ()):
                if wrong != "not sent" or step < 20 or number:
                    dist.broadcast(parameter.data, rank % 2 + 2 * (number % 2), group=group)
    return {row.name: row.replica for row in load_run(folder).meta(rank).params}


def train_others_by_hand(rank: int, world: int, folder: Path, how: str, wrong: str) -> dict[str, str]:
    """A model of which rank r holds half r % 2, and an optimizer of other tensors; the copies of the model's.

    `how`: "masters", in FP64, or "shares" of one buffer with all parameters. `wrong`: "data", "flip" or "".
    """
    group = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    torch.manual_seed(rank % 2)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    params = list(model.parameters())
    flat = torch.nn.utils.parameters_to_vector(params).detach()
    masters = [p.detach().double() for p in params] if how == "masters" else [flat.chunk(2)[rank // 2].clone()]
    optimizer = torch.optim.Adam(masters, lr=1e-3)
    inputs = torch.Generator().manual_seed(rank % 2 if wrong == "data" else rank)
    with dtobs.attach(model, optimizer, run_dir=folder, monitor=False) as session:
        for step in range(1, 31):
            session.step(step)
            model.zero_grad()
            model(torch.randn(4, 6, generator=inputs)).square().mean().backward()
            if how == "masters":
                for master, parameter in zip(masters, params, strict=True):
                    master.grad = parameter.grad.double()
                    dist.all_reduce(master.grad, group=group)
            else:
                masters[0].grad = torch.empty_like(masters[0])
                gradients = torch.cat([p.grad.flatten() for p in params])
                dist.reduce_scatter_tensor(masters[0].grad, gradients, group=group)
            optimizer.step()
            if how == "shares":
                dist.all_gather_into_tensor(flat, masters[0], group=group)
                torch.nn.utils.vector_to_parameters(flat, params)
            else:
                for master, parameter in zip(masters, params, strict=True):
                    parameter.data.copy_(master)
            if wrong == "flip" and step == 20 and rank == 2:
                params[2].data[1, 2] += 0.5
    return {row.name: row.replica for row in load_run(folder).meta(rank).params}


def wrap(rank: int, world_size: int) -> list[bool]:
    """Whether the DDP around a model is found, and none around another."""
    inner, other = nn.Linear(4, 4), nn.Linear(4, 4)
    outer = DistributedDataParallel(inner)
    adapted, beside = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4)
    adapted[0].requires_grad_(False)
    around, both = DistributedDataParallel(nn.ModuleDict({"base": adapted})), nn.ModuleList([beside, nn.Linear(4, 4)])
    DistributedDataParallel(both)
    return [
        wrapper_around(inner) is outer,
        wrapper_around(outer) is outer,
        wrapper_around(other) is other,
        wrapper_around(adapted) is around,
        wrapper_around(beside) is beside,
    ]


def given_before_it_is_wrapped(rank: int, world_size: int, folder: Path, kind: str) -> None:
    """Train a model that dtobs is given first, and that is wrapped in DDP or sharded afterwards."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with dtobs.attach(model, optimizer, run_dir=folder, monitor=False):
        called: nn.Module = model
        if kind == "ddp":
            called = DistributedDataParallel(model)
        elif kind == "fsdp":
            fully_shard(model)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(8):
            optimizer.zero_grad()
            called(torch.full((2, 4), float(rank + step))).square().mean().backward()
            optimizer.step()


def describe_flat(rank: int, world_size: int, strategy: str) -> tuple[list[int], set[str], list[int]]:
    """Of a model under FSDP1: the data ranks, the replica keys of its parameters, and the lengths of its flat ones."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    model = FullyShardedDataParallel(
        nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=True,
        device_id=torch.device("cpu"),
        device_mesh=mesh if strategy == "HYBRID_SHARD" else None,
    )
    keys = {row.row.replica for row in model_tensors(model)}
    return list(find_layout(model).data_ranks), keys, [flat.length for flat in flat_parameters(model)]


def sharded_along_names(rank: int, world_size: int, folder: Path, sharded: bool) -> None:
    """Train a model of DTensors on a mesh of two dimensions, over one of which FSDP shards or copies them."""
    from torch.distributed.fsdp import DataParallelMeshDims

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("data", "tensor"))
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Tanh(), nn.Linear(32, 16, bias=False))
    distribute_module(model, mesh)
    along = DataParallelMeshDims(shard="data") if sharded else DataParallelMeshDims(replicate="data")
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh, dp_mesh_dims=along)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with dtobs.attach(model, optimizer, run_dir=folder, monitor=False):
        torch.manual_seed(rank)
        for _ in range(6):
            batch = DTensor.from_local(torch.randn(2, 16), mesh, [Shard(0), Replicate()])
            model(batch).to_local().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
