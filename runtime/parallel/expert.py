"""Expert parallelism: the ranks of a group hold different experts and send each other the tokens that want them.

Every rank routes its own tokens as before. Two all-to-alls around the experts take each visit to the rank that holds
its expert and back. An expert sees tokens of all ranks of the group, so its gradient is a sum over them where the rest
of the model has a mean: it is divided by the size of the group here, and reduced with its copies by FSDP elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from runtime.model.experts import Experts, MixtureOfExperts, run_experts


class _AllToAll(torch.autograd.Function):
    """Rows to other ranks, `sent[r]` to rank r, and `received[r]` from it; backward sends gradients back."""

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(x_ND, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _exchange(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(x_ND: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    result = x_ND.new_empty((sum(received), x_ND.shape[1]))
    dist.all_to_all_single(result, x_ND.contiguous(), received, sent, group=group)
    return result


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None


class ParallelExperts(nn.Module):
    """This rank's share of a layer's experts, in the place of `Experts`: the same parameter names, the same call."""

    def __init__(self, experts: Experts, mesh: DeviceMesh) -> None:
        """`experts` is whole on every rank; `mesh` has the expert dimension only."""
        super().__init__()
        for name, parameter in experts.named_parameters():
            share = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            self.register_parameter(name, nn.Parameter(share))
        self.group = mesh.get_group()

    def forward(self, x_ND: Tensor, counts_X: Tensor) -> Tensor:
        """Take each row to its expert's rank and back; shapes as in `Experts`."""
        ranks = dist.get_world_size(self.group)
        incoming_X = torch.empty_like(counts_X)
        dist.all_to_all_single(incoming_X, counts_X, group=self.group)
        received_RX = incoming_X.view(ranks, -1)  # from each rank, for each local expert
        sent, received = counts_X.view(ranks, -1).sum(dim=1).tolist(), received_RX.sum(dim=1).tolist()
        visitors_ND = _AllToAll.apply(x_ND, sent, received, self.group)
        # They arrive by rank, then by expert; the experts want them by expert.
        experts = torch.arange(received_RX.shape[1], device=counts_X.device).repeat(ranks)
        order = experts.repeat_interleave(received_RX.flatten()).argsort(stable=True)
        weights = [_ScaleGradient.apply(_local(w), 1 / ranks) for w in (self.gate, self.up, self.down)]
        sorted_ND = run_experts(visitors_ND[order], received_RX.sum(dim=0), *weights)
        results_ND = torch.empty_like(sorted_ND).index_copy(0, order, sorted_ND)
        result: Tensor = _AllToAll.apply(results_ND, received, sent, self.group)
        return result


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def apply(block: nn.Module, mesh: DeviceMesh) -> ParallelExperts:
    """Keep this rank's share of one block's experts; the module that holds it."""
    layer = block.feed_forward
    assert isinstance(layer, MixtureOfExperts)
    assert isinstance(layer.experts, Experts)
    share = ParallelExperts(layer.experts, mesh)
    layer.experts = share
    return share
