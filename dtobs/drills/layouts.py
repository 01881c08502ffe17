"""One small model under every way to spread it over the ranks that a drill knows; each applied from outside."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.nn import functional as differentiable
from torch.distributed.tensor import DTensor

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


class _Mixing(nn.Module, ABC):
    """The model of the drills, whose last layer is also given what `mix` makes of its input, and of other ranks'."""

    def __init__(self, plain: nn.Sequential) -> None:
        super().__init__()
        self.plain = plain

    @abstractmethod
    def mix(self, x_BH: Tensor) -> Tensor:
        """What other ranks have to do with, float32[B, HIDDEN]."""

    def forward(self, x_BW: Tensor) -> Tensor:
        """What the whole model makes of this rank's rows."""
        *before, last = self.plain
        for layer in before:
            x_BW = layer(x_BW)
        y_BW: Tensor = last(x_BW + self.mix(x_BW))
        return y_BW


class _Context(_Mixing):
    """Each rank of `group` has a part of the sequence, the rows; all of them see the mean of the whole."""

    def __init__(self, plain: nn.Sequential, group: dist.ProcessGroup) -> None:
        super().__init__(plain)
        self.group = group

    def mix(self, x_BH: Tensor) -> Tensor:
        """The mean over the sequence, in each row."""
        total_H: Tensor = differentiable.all_reduce(x_BH.mean(0), group=self.group)  # type: ignore[no-untyped-call]
        return (total_H / self.group.size()).expand_as(x_BH)


class _Experts(_Mixing):
    """Each rank of `group` has an expert of its own, to which the others send their share of rows."""

    def __init__(self, plain: nn.Sequential, group: dist.ProcessGroup) -> None:
        super().__init__(plain)
        self.group = group
        with torch.random.fork_rng():
            torch.manual_seed(99 + group.rank())
            self.expert = nn.Linear(HIDDEN, HIDDEN, dtype=next(plain.parameters()).dtype)

    def mix(self, x_BH: Tensor) -> Tensor:
        """What the experts make of the rows, each of an equal share."""
        there_BH: Tensor = self.expert(self._exchanged(x_BH))
        return self._exchanged(there_BH)

    def _exchanged(self, x_BH: Tensor) -> Tensor:
        empty_BH = torch.empty_like(x_BH)
        got_BH: Tensor = differentiable.all_to_all_single(empty_BH, x_BH.contiguous(), group=self.group)  # type: ignore[no-untyped-call]
        return got_BH


Criterion = Callable[[Tensor, Tensor], Tensor]
"""From what the model says and what was wanted, float32[B, WIDTH] each, to a loss."""


@dataclass(frozen=True)
class Spread:
    """What one rank holds of the model, and how it is trained.

    `learn` does forward and backward of one batch, float32[B, WIDTH], and its targets; `reduce` is called before the
    optimizer steps. `optimizer` makes one of a class, of parameters and settings. `replicas` is where a loop by hand
    says that its copies are, and `data_rank` tells the ranks apart that read different samples. `schedule` is that of a
    pipeline.
    """

    model: nn.Module
    learn: Callable[[Tensor, Tensor, Criterion], None]
    reduce: Callable[[], None]
    data_rank: int
    mesh: DeviceMesh | None = None
    replicas: Any = "auto"
    optimizer: Callable[..., torch.optim.Optimizer] = lambda kind, parameters, **settings: kind(parameters, **settings)
    schedule: Any = None


def spread(model: nn.Module, layout: Layout, group: Any = None) -> Spread:
    """Spread `model`, a sequence of layers of which the first and the last are linear, over all ranks.

    `group` is the process group that "by-hand" averages gradients in.
    """
    mesh = _mesh(layout)
    if layout in ("pp", "dp-pp"):
        assert mesh is not None
        return _pipeline(model, mesh)
    if layout in ("dp-cp", "dp-ep"):
        assert mesh is not None
        return _context(model, mesh) if layout == "dp-cp" else _experts(model, mesh)
    data_rank, reduce = dist.get_rank(), _do_nothing
    if layout in ("ddp", "zero1"):
        model = nn.parallel.DistributedDataParallel(model)
    elif layout in ("tp", "dp-tp"):
        assert mesh is not None
        _split_layers(model, mesh["tensor"])
        data_rank, reduce = _over_data(model, mesh)
    elif layout in ("fsdp", "hsdp"):
        _fully_shard(model, mesh)
    elif layout == "fsdp1":
        model = _flatten(model)
    elif layout == "by-hand":
        reduce = partial(average_gradients, model, group)
    return Spread(
        model,
        learner(model),
        reduce,
        data_rank,
        mesh,
        replicas=dist.group.WORLD if layout == "by-hand" else "auto",
        **({"optimizer": _shared_out} if layout == "zero1" else {}),
    )


def learner(model: nn.Module) -> Callable[[Tensor, Tensor, Criterion], None]:
    """Forward and backward of one batch through `model`."""

    def learn(batch_BW: Tensor, wanted_BW: Tensor, criterion: Criterion) -> None:
        torch.autograd.backward(criterion(model(batch_BW), wanted_BW))

    return learn


def loss(predicted_BW: Tensor, _wanted_BW: Tensor) -> Tensor:
    """The mean square of what the model says."""
    return predicted_BW.square().mean()


def average_gradients(model: nn.Module, group: Any = None) -> None:
    """What DDP does, without it."""
    for parameter in model.parameters():
        gradient = parameter.grad
        assert gradient is not None
        dist.all_reduce(gradient._local_tensor if isinstance(gradient, DTensor) else gradient, group=group)
        gradient /= dist.get_world_size(group)


def _do_nothing() -> None:
    pass


def _shared_out(kind: type[torch.optim.Optimizer], parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    """ZeRO-1: each rank steps a part of the parameters and sends it to the others."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, kind, **settings)


def _mesh(layout: Layout) -> DeviceMesh | None:
    world = dist.get_world_size()
    names = {
        "fsdp": ("shard",),
        "hsdp": ("replicate", "shard"),
        "tp": ("tensor",),
        "pp": ("pipeline",),
        "dp-tp": ("data", "tensor"),
        "dp-pp": ("data", "pipeline"),
        "dp-cp": ("data", "context"),
        "dp-ep": ("data", "expert"),
    }
    shapes = {"hsdp": (world, 1), **{name: (world // 2, 2) for name in names if name.startswith("dp-")}}
    if layout not in names:
        return None
    return init_device_mesh("cpu", shapes.get(layout, (world,)), mesh_dim_names=names[layout])


def _context(model: nn.Module, mesh: DeviceMesh) -> Spread:
    assert isinstance(model, nn.Sequential)
    mixing = _Context(model, mesh.get_group("context"))

    def share(batch: Tensor) -> Tensor:
        return batch.chunk(mesh["context"].size())[mesh.get_local_rank("context")]

    def learn(batch_BW: Tensor, wanted_BW: Tensor, criterion: Criterion) -> None:
        torch.autograd.backward(criterion(mixing(share(batch_BW)), share(wanted_BW)))

    return Spread(mixing, learn, partial(average_gradients, mixing), mesh.get_local_rank("data"), mesh)


def _experts(model: nn.Module, mesh: DeviceMesh) -> Spread:
    """Gradients of the experts are averaged over those who have the same one, and got a share from all ranks."""
    assert isinstance(model, nn.Sequential)
    mixing, experts = _Experts(model, mesh.get_group("expert")), mesh["expert"].size()

    def reduce() -> None:
        average_gradients(mixing.plain)
        average_gradients(mixing.expert, mesh.get_group("data"))
        for parameter in mixing.expert.parameters():
            assert parameter.grad is not None
            parameter.grad /= experts

    return Spread(mixing, learner(mixing), reduce, dist.get_rank(), mesh)


def _over_data(model: nn.Module, mesh: DeviceMesh) -> tuple[int, Callable[[], None]]:
    """The rank along the mesh's data dimension, and the averaging over it; of a mesh without one all read the same."""
    if "data" not in (mesh.mesh_dim_names or ()):
        return 0, _do_nothing
    return mesh.get_local_rank("data"), partial(average_gradients, model, mesh.get_group("data"))


def _split_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the first linear layer by columns and the last one by rows, as Megatron does."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    linear = [name for name, layer in model.named_children() if isinstance(layer, nn.Linear)]
    parallelize_module(model, mesh, {linear[0]: ColwiseParallel(), linear[-1]: RowwiseParallel()})


def _fully_shard(model: nn.Module, mesh: DeviceMesh | None) -> None:
    from torch.distributed.fsdp import fully_shard

    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _flatten(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    cpu = torch.device("cpu")
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True, device_id=cpu
    )


def _pipeline(model: nn.Module, mesh: DeviceMesh) -> Spread:
    """The last layer is the last rank's stage, all before it the first's; between them linear layers."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    place, stages = mesh.get_local_rank("pipeline"), mesh["pipeline"].size()
    layers = list(model.children())
    part: nn.Module = nn.Linear(HIDDEN, HIDDEN)
    if place == 0:
        part = nn.Sequential(*layers[:-1])
    elif place == stages - 1:
        part = layers[-1]
    stage = PipelineStage(part, place, stages, torch.device("cpu"), group=mesh.get_group("pipeline"))
    data_rank, reduce = _over_data(part, mesh)
    now: list[Criterion] = [loss]
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=lambda predicted, wanted: now[0](predicted, wanted))

    def learn(batch_BW: Tensor, wanted_BW: Tensor, criterion: Criterion) -> None:
        now[0] = criterion
        if place == 0:
            schedule.step(batch_BW)
        elif place == stages - 1:
            schedule.step(target=wanted_BW)
        else:
            schedule.step()

    return Spread(part, learn, reduce, data_rank, mesh, schedule=schedule)
