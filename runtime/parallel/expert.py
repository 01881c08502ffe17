"""The experts of a mixture shared among ranks, whole ones (`expert`) or slices of each (`tensor`), or both.

expert    Ranks hold different experts and send each other the tokens that want them. Every rank routes its own tokens
          as before; two all-to-alls around the experts take each visit to the rank that holds its expert and back. An
          expert sees tokens of all ranks of the group, so its gradient is a sum over them where the rest of the model
          has a mean: it is divided by the size of the group here, and reduced with its copies by FSDP elsewhere.
tensor    Ranks hold some hidden units of every expert. All of them have the same tokens and route them alike; what
          their units give is added up.
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
    def forward(ctx: Any, x_ND: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
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


class _AddGradients(torch.autograd.Function):
    """The same tensor on every rank of a group, each of which has a part of its gradient: backward adds them up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        whole = gradient.clone()
        dist.all_reduce(whole, group=ctx.group)
        return whole, None


class _AddResults(torch.autograd.Function):
    """The sum of a tensor over a group, the same on every rank; each rank's gradient is that of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = x.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class ParallelExperts(nn.Module):
    """This rank's share of a layer's experts, in the place of `Experts`: the same parameter names, the same call."""

    def __init__(self, experts: Experts, mesh: DeviceMesh) -> None:
        """`experts` is whole on every rank; `mesh` has the dimensions expert and tensor, or one of them."""
        super().__init__()
        names = mesh.mesh_dim_names or ()
        for name, parameter in experts.named_parameters():
            # gate and up are [X, D, F], down is [X, F, D].
            cut = {"expert": Shard(0), "tensor": Shard(1 if name == "down" else 2)}
            placements = [cut[dimension] for dimension in names]
            share = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
            self.register_parameter(name, nn.Parameter(share))
        self.expert_group = mesh.get_group("expert") if "expert" in names else None
        self.tensor_group = mesh.get_group("tensor") if "tensor" in names else None

    def forward(self, x_ND: Tensor, counts_X: Tensor) -> Tensor:
        """As `Experts`: rows sorted by expert, how many each has, their results."""
        if self.expert_group is None:
            return self._run(x_ND, counts_X, [_local(w) for w in (self.gate, self.up, self.down)])
        return self._run_elsewhere(x_ND, counts_X, self.expert_group)

    def _run_elsewhere(self, x_ND: Tensor, counts_X: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Take each row to its expert's rank and back."""
        ranks = dist.get_world_size(group)
        incoming_X = torch.empty_like(counts_X)
        dist.all_to_all_single(incoming_X, counts_X, group=group)
        received_RX = incoming_X.view(ranks, -1)  # from each rank, for each local expert
        sent, received = counts_X.view(ranks, -1).sum(dim=1).tolist(), received_RX.sum(dim=1).tolist()
        visitors_ND = _AllToAll.apply(x_ND, sent, received, group)
        # They arrive by rank, then by expert; the experts want them by expert.
        experts = torch.arange(received_RX.shape[1], device=counts_X.device).repeat(ranks)
        order = experts.repeat_interleave(received_RX.flatten()).argsort(stable=True)
        weights = [_ScaleGradient.apply(_local(w), 1 / ranks) for w in (self.gate, self.up, self.down)]
        sorted_ND = self._run(visitors_ND[order], received_RX.sum(dim=0), weights)
        results_ND = torch.empty_like(sorted_ND).index_copy(0, order, sorted_ND)
        result: Tensor = _AllToAll.apply(results_ND, received, sent, group)
        return result

    def _run(self, x_ND: Tensor, counts_X: Tensor, weights: list[Tensor]) -> Tensor:
        """Run the experts that are here, on all their hidden units wherever these are."""
        if self.tensor_group is None:
            return run_experts(x_ND, counts_X, *weights)
        part_ND = run_experts(_AddGradients.apply(x_ND, self.tensor_group), counts_X, *weights)
        result: Tensor = _AddResults.apply(part_ND, self.tensor_group)
        return result


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def apply(block: nn.Module, mesh: DeviceMesh) -> ParallelExperts:
    """Keep this rank's share of one block's experts, over the dimensions of `mesh`; the module that holds it."""
    layer = block.feed_forward
    assert isinstance(layer, MixtureOfExperts)
    assert isinstance(layer.experts, Experts)
    share = ParallelExperts(layer.experts, mesh)
    layer.experts = share
    return share
