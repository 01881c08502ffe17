"""Context parallelism: the ranks of a group share each sequence, so that a long one fits.

A sequence is cut into 2n chunks and rank r takes chunks r and 2n − 1 − r: with causal attention an early chunk sees
little and a late one much, and every rank gets one of each kind. All else in the model works on tokens one by one; in
attention each rank gathers the keys and values of the whole sequence (few, with grouped queries) and attends with its
own queries, as Llama 3 was trained (arXiv 2407.21783, section 3.3.2).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right


def positions(sequence: int, rank: int, ranks: int) -> Tensor:
    """The positions [sequence / ranks] of the tokens that `rank` of `ranks` works on, in its own order."""
    chunk = sequence // (2 * ranks)
    early, late = rank * chunk, (2 * ranks - 1 - rank) * chunk
    return torch.cat((torch.arange(early, early + chunk), torch.arange(late, late + chunk)))


class _Gather(torch.autograd.Function):
    """Every rank's [B, K, T/n, E] as one [n, B, K, T/n, E]; backward adds up what the ranks have for each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        ranks = dist.get_world_size(group)
        gathered = x.new_empty((ranks * x.shape[0], *x.shape[1:]))  # one after the other: what Gloo accepts
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        return gathered.unflatten(0, (ranks, x.shape[0]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        own = gradient.new_empty(gradient.shape[1:])
        dist.reduce_scatter_tensor(own, gradient.flatten(0, 1).contiguous(), group=ctx.group)
        return own, None


class ContextParallelAttention(nn.Module):
    """Stands in for CausalAttention where a rank has two chunks of each sequence."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor) -> Tensor:
        """Attend over the whole sequence; all shapes have the local T/n, returns [B, H, T/n, E]."""
        rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        keys, values = self._whole(k_BKTE), self._whole(v_BKTE)
        results = []
        for number, query in zip((rank, 2 * ranks - 1 - rank), q_BHTE.chunk(2, dim=2), strict=True):
            seen = (number + 1) * query.shape[2]
            results.append(
                F.scaled_dot_product_attention(
                    query,
                    keys[:, :, :seen],
                    values[:, :, :seen],
                    # The chunk's queries are the last of the tokens it sees.
                    attn_mask=causal_lower_right(query.shape[2], seen),
                    enable_gqa=query.shape[1] != keys.shape[1],
                )
            )
        return torch.cat(results, dim=2)

    def _whole(self, x_BKTE: Tensor) -> Tensor:
        """The whole sequence's [B, K, T, E] in order, from every rank's two chunks."""
        early, late = _Gather.apply(x_BKTE, self.group).chunk(2, dim=3)
        return torch.cat((*early.unbind(0), *reversed(late.unbind(0))), dim=2)


def apply(block: nn.Module, group: dist.ProcessGroup) -> None:
    """Let one block attend over the group's whole sequences."""
    attention = block.attention
    assert isinstance(attention, nn.Module)
    attention.core = ContextParallelAttention(group)
