"""The true global gradient norm, clipping, and what happens when gradients are not finite.

A gradient may be a plain tensor (DDP), a DTensor sharded over some mesh dimensions (FSDP2, tensor parallel), partial
over others (norm weights under sequence parallel), and pipeline ranks hold different layers. The norm counts every
element once: sums of squares are added over the mesh dimensions a tensor is sharded on, and over the pipeline.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from runtime.errors import NonFiniteError


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _finish_partial(parameter: nn.Parameter) -> None:
    """Add up a gradient that is still a partial sum along some mesh dimension, in place of it."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
        whole = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
        parameter.grad = gradient.redistribute(placements=whole)


def global_norm(parameters: Iterable[nn.Parameter], pipeline: dist.ProcessGroup | None = None) -> Tensor:
    """The L2 norm of all gradients of the whole model, equal on every rank; the same as on one rank.

    FP32, a scalar where the gradients are: the host does not wait for it. `pipeline` is the group of ranks that hold
    other layers. One small all-reduce for each distinct way of sharding.
    """
    squares: dict[tuple[tuple[str, ...], tuple[int, ...]], list[Tensor]] = defaultdict(list)
    meshes: dict[tuple[str, ...], DeviceMesh] = {}
    device = torch.device("cpu")
    for parameter in parameters:
        _finish_partial(parameter)
        gradient = parameter.grad
        if gradient is None:
            continue
        device = gradient.device
        names: tuple[str, ...] = ()
        dimensions: tuple[int, ...] = ()
        if isinstance(gradient, DTensor):
            names = tuple(gradient.device_mesh.mesh_dim_names or ())
            meshes[names] = gradient.device_mesh
            # Not is_shard(): FSDP2 over tensor parallelism has a strided shard, which denies being one.
            dimensions = tuple(i for i, placement in enumerate(gradient.placements) if not placement.is_replicate())
        squares[names, dimensions].append(_local(gradient))
    total = torch.zeros((), dtype=torch.float32, device=device)
    # Sorted, so that every rank issues the collectives in the same order.
    for (names, dimensions), gradients in sorted(squares.items(), key=lambda item: item[0]):
        norms = torch._foreach_norm(gradients, dtype=torch.float32)
        square = torch.stack([norm.to(device) for norm in norms]).square().sum()
        for dimension in dimensions:
            dist.all_reduce(square, group=meshes[names].get_group(dimension))
        total += square
    if pipeline is not None:
        dist.all_reduce(total, group=pipeline)
    return total.sqrt()


def fetch(*values: Tensor, device: torch.device) -> list[float]:
    """Scalars as numbers: the host waits once, until all that are on `device` are known."""
    together = torch.stack([value.to(device, torch.float64, non_blocking=True) for value in values])
    numbers: list[float] = together.tolist()
    return numbers


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply every gradient by `factor`, in place."""
    gradients = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)


def clip_factor(norm: float, limit: float) -> float:
    """The factor that brings gradients of global `norm` to at most `limit`; 1 without a limit."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0


class NonFiniteGuard:
    """Counts steps whose gradients are not finite; raises after `limit` of them in a row.

    A loss scale above 1 may be what was too high: halving it is tried to its end first, however many steps that takes.
    It is asked on every step, before the optimizer: checking now and then lets the weights go bad in between.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_row = 0
        self.total = 0

    def check(self, norm: float, step: int, *, loss_scale: float = 1.0) -> bool:
        """True where the step, made with `loss_scale`, may be taken.

        Raises NonFiniteError at the limit, on all ranks at the same step.
        """
        if math.isfinite(norm):
            self.in_row = 0
            return True
        self.in_row += 1
        self.total += 1
        if self.in_row >= self.limit and loss_scale <= 1:
            raise NonFiniteError(
                f"the gradient norm was {norm} in {self.in_row} steps in a row, up to step {step}; the parameters are"
                f" those of step {step - self.in_row}: lower the learning rate or look at the data of these steps"
            )
        return False
