"""One small model under every way to spread it over the ranks that a drill knows; each applied from outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtobs.drills.faults import Layout

WIDTH, HIDDEN = 32, 64
MICRO_BATCHES = 2


class Branched(nn.Module):
    """The model of the drills with a part that is only used while `aside` says so."""

    def __init__(self, plain: nn.Sequential) -> None:
        super().__init__()
        self.plain, self.aside = plain, nn.Linear(WIDTH, WIDTH)
        self.use_aside = True

    def forward(self, x_BW: Tensor) -> Tensor:
        y_BW: Tensor = self.plain(x_BW)
        return y_BW + self.aside(x_BW) if self.use_aside else y_BW


@dataclass(frozen=True)
class Spread:
    """What one rank holds of the model. `learn` does forward and backward of one batch, float32[B, WIDTH].

    `replicated` says whether the ranks read different samples. `schedule` is that of a pipeline.
    """

    model: nn.Module
    learn: Callable[[Tensor], None]
    mesh: DeviceMesh | None = None
    replicated: bool = True
    schedule: Any = None


def spread(model: nn.Module, layout: Layout, group: Any = None) -> Spread:
    """Spread `model` (for "tp" and "pp" a Sequential of Linear, ReLU, Linear) over all ranks.

    `group` is the process group that "by-hand" averages gradients in.
    """
    if layout == "pp":
        return _pipeline(model)
    mesh = _mesh(layout)
    if layout == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif layout == "tp":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    elif layout in ("fsdp", "hsdp"):
        _fully_shard(model, mesh)

    def learn(batch_BW: Tensor) -> None:
        torch.autograd.backward(loss(model(batch_BW), batch_BW))
        if layout == "by-hand":
            average_gradients(model, group)

    return Spread(model, learn, mesh, replicated=layout != "tp")


def loss(predicted_BW: Tensor, _target_BW: Tensor) -> Tensor:
    """The mean square of what the model says."""
    return predicted_BW.square().mean()


def average_gradients(model: nn.Module, group: Any = None) -> None:
    """What DDP does, without it."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size()


def _mesh(layout: Layout) -> DeviceMesh | None:
    world = dist.get_world_size()
    if layout == "hsdp":
        return init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
    names = {"fsdp": "shard", "tp": "tensor", "pp": "pipeline"}
    return init_device_mesh("cpu", (world,), mesh_dim_names=(names[layout],)) if layout in names else None


def _fully_shard(model: nn.Module, mesh: DeviceMesh | None) -> None:
    from torch.distributed.fsdp import fully_shard

    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _pipeline(model: nn.Module) -> Spread:
    """The first linear layer is the first rank's stage, the last one the last rank's; between them linear layers."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, world = dist.get_rank(), dist.get_world_size()
    layers = list(model.children())
    part: nn.Module = nn.Linear(HIDDEN, HIDDEN)
    if rank == 0:
        part = nn.Sequential(*layers[:2])
    elif rank == world - 1:
        part = layers[-1]
    schedule = Schedule1F1B(PipelineStage(part, rank, world, torch.device("cpu")), MICRO_BATCHES, loss_fn=loss)

    def learn(batch_BW: Tensor) -> None:
        if rank == 0:
            schedule.step(batch_BW)
        elif rank == world - 1:
            schedule.step(target=batch_BW)
        else:
            schedule.step()

    return Spread(part, learn, _mesh("pp"), replicated=False, schedule=schedule)
