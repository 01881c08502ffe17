"""Ranks that say what they see of a layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import dtobs
from dtobs.probes.layout import find_layout, model_tensors


class Block(nn.Module):
    """Norm and two matrices: what tensor parallelism does to a transformer's block, in small."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32, bias=False)
        self.down = nn.Linear(32, 16, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(x_BTD)))


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
