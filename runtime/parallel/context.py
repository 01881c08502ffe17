"""Context parallelism: the ranks of a group share each sequence, so that a long one fits; attention goes round a ring.

A sequence is cut into 2n chunks and rank r takes chunks r and 2n − 1 − r: with causal attention an early chunk sees
little and a late one much, and every rank gets one of each kind. All else in the model works on tokens one by one. In
attention the queries stay, and keys and values travel from rank to rank: n − 1 times each rank sends on what it has
while it attends to it, and what it finds is merged by log-sum-exp (Liu et al. 2023, ring attention). No rank ever
holds more than two ranks' keys. In the backward pass they travel again, with their gradients behind them.

Whole blocks can be left out, which is what the two chunks are for. Of the keys of rank j, rank r needs
    j = r   both chunks, causally
    j < r   the early chunk, seen by all its queries (the late one is after all of them)
    j > r   both chunks, seen by its late queries (its early ones are before all of them)
so that after the first one every step is the same work on every rank: half of what it would be without causality.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.model.experts import MixtureOfExperts
from runtime.parallel import blockwise


def positions(sequence: int, rank: int, ranks: int) -> Tensor:
    """The positions [sequence / ranks] of the tokens that `rank` of `ranks` works on, in its own order."""
    chunk = sequence // (2 * ranks)
    early, late = rank * chunk, (2 * ranks - 1 - rank) * chunk
    return torch.cat((torch.arange(early, early + chunk), torch.arange(late, late + chunk)))


class _Hop:
    """One tensor on its way to the next rank of the ring, and the previous rank's on its way here."""

    def __init__(self, sent: Tensor, group: dist.ProcessGroup) -> None:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self._sent = sent.contiguous()  # kept until it is gone
        self._received = torch.empty_like(self._sent)
        after, before = (rank + 1) % ranks, (rank - 1) % ranks
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, group=group, group_peer=after),
                dist.P2POp(dist.irecv, self._received, group=group, group_peer=before),
            ]
        )

    def arrived(self) -> Tensor:
        """Wait for it."""
        for work in self._works:
            work.wait()
        return self._received


def _needed(rank: int, owner: int, tokens: int) -> tuple[slice, slice, bool]:
    """Which of `rank`'s queries look at which of `owner`'s keys, and whether causally; both have `tokens`."""
    whole, early, late = slice(0, tokens), slice(0, tokens // 2), slice(tokens // 2, tokens)
    if owner == rank:
        return whole, whole, True
    return (whole, early, False) if owner < rank else (late, whole, False)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        keys_values = torch.stack((k, v))
        result, logsumexp = q, q  # the first step sets them
        for step in range(ranks):
            hop = _Hop(keys_values, group) if step < ranks - 1 else None
            queries, keys, causal = _needed(rank, (rank - step) % ranks, q.shape[2])
            k_seen, v_seen = keys_values[:, :, :, keys].unbind(0)
            found = blockwise.forward(q[:, :, queries], k_seen, v_seen, causal=causal)
            if step == 0:
                result, logsumexp = found
            else:
                merged = blockwise.merge((result[:, :, queries], logsumexp[:, :, queries]), found)
                result = torch.cat((result[:, :, : queries.start].float(), merged[0]), dim=2)
                logsumexp = torch.cat((logsumexp[:, :, : queries.start], merged[1]), dim=2)
            if hop is not None:
                keys_values = hop.arrived()
        result = result.to(q.dtype)
        ctx.group = group
        ctx.save_for_backward(q, k, v, result, logsumexp)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        q, k, v, result, logsumexp = ctx.saved_tensors
        rank, ranks = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        keys_values = torch.stack((k, v))
        q_gradient = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        behind: _Hop | None = None  # the gradients of the keys and values that are here, one hop late
        for step in range(ranks):
            hop = _Hop(keys_values, ctx.group) if step < ranks - 1 else None
            queries, keys, causal = _needed(rank, (rank - step) % ranks, q.shape[2])
            k_seen, v_seen = keys_values[:, :, :, keys].unbind(0)
            found = blockwise.backward(
                *(gradient[:, :, queries], q[:, :, queries], k_seen, v_seen),
                *(result[:, :, queries], logsumexp[:, :, queries].contiguous()),
                causal=causal,
            )
            q_gradient[:, :, queries] += found[0]
            travelling = (
                torch.zeros(keys_values.shape, dtype=torch.float32, device=q.device)
                if behind is None
                else behind.arrived()
            )
            travelling[:, :, :, keys] += torch.stack(found[1:])
            behind = _Hop(travelling, ctx.group)  # the last one brings them home
            if hop is not None:
                keys_values = hop.arrived()
        assert behind is not None
        k_gradient, v_gradient = behind.arrived().to(k.dtype).unbind(0)
        return q_gradient.to(q.dtype), k_gradient, v_gradient, None


class RingAttention(nn.Module):
    """Stands in for CausalAttention where a rank has two chunks of each sequence."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    @torch.compiler.disable  # sends and receives do not belong into a compiled graph
    def forward(self, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor) -> Tensor:
        """Attend over the whole sequence; all shapes have the local T/n, returns [B, H, T/n, E]."""
        result: Tensor = _RingAttention.apply(q_BHTE, k_BKTE, v_BKTE, self.group)
        return result


def apply(block: nn.Module, group: dist.ProcessGroup) -> None:
    """Let one block attend over the group's whole sequences."""
    attention = block.attention
    assert isinstance(attention, nn.Module)
    attention.core = RingAttention(group)
    if isinstance(block.feed_forward, MixtureOfExperts):
        block.feed_forward.over_sequence = lambda fractions_BX: _mean(fractions_BX, group)


def _mean(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The mean over the group of a tensor without gradient; its ranks have equally many tokens."""
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total / dist.get_world_size(group)
