"""Attention on one block of keys at a time: partial results carry their log-sum-exp, so that they can be merged.

Softmax over several blocks is the mean of the blocks' softmaxes, weighted by each block's share of the sum of
exponentials (Milakov & Gimelshein 2018). In the backward pass the merged result and log-sum-exp give every block its
final probabilities at once, so no block needs another's (Dao 2023, FlashAttention-2, section 3.1).

Shapes: B samples, H query heads, K key/value heads, Q queries, S keys, E head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)


def forward(q_BHQE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Result [B, H, Q, E] and log-sum-exp FP32 [B, H, Q] of one block. `causal` needs Q = S."""
    if q_BHQE.device.type == "cpu":
        operation = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        result, logsumexp = operation(q_BHQE, k_BKSE, v_BKSE, is_causal=causal)
    elif _has_flash(q_BHQE):
        result, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention(
            q_BHQE, k_BKSE, v_BKSE, is_causal=causal
        )[:2]
    else:
        return written_out(q_BHQE, k_BKSE, v_BKSE, causal=causal)
    return result, logsumexp


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The result and log-sum-exp over the keys of both blocks, FP32."""
    (result_1, logsumexp_1), (result_2, logsumexp_2) = first, second
    logsumexp = torch.logaddexp(logsumexp_1, logsumexp_2)
    share_1, share_2 = (logsumexp_1 - logsumexp).exp(), (logsumexp_2 - logsumexp).exp()
    return result_1.float() * share_1[..., None] + result_2.float() * share_2[..., None], logsumexp


def backward(
    gradient: Tensor, q_BHQE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, result: Tensor, logsumexp: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What one block adds to the gradients of queries, keys and values; `result` and `logsumexp` are merged."""
    if q_BHQE.device.type == "cpu":
        operation = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = operation(gradient, q_BHQE, k_BKSE, v_BKSE, result, logsumexp, 0.0, causal)
    elif _has_flash(q_BHQE):
        # Without dropout the kernel reads no random numbers; their state only has to be there.
        state = torch.zeros(2, dtype=torch.uint64, device=q_BHQE.device)
        operation = torch.ops.aten._scaled_dot_product_flash_attention_backward
        lengths = (None, None, q_BHQE.shape[2], k_BKSE.shape[2])
        found = operation(*(gradient, q_BHQE, k_BKSE, v_BKSE, result, logsumexp, *lengths, 0.0, causal, state, state))
    else:
        return written_out_backward(gradient, q_BHQE, k_BKSE, v_BKSE, result, logsumexp, causal=causal)
    return found[0], found[1], found[2]


def written_out(q_BHQE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """`forward` in plain products, for formats that no kernel takes; holds the block's [B, H, Q, S]."""
    k_BHSE, v_BHSE = _to_heads(k_BKSE, q_BHQE), _to_heads(v_BKSE, q_BHQE)
    scores_BHQS = _scores(q_BHQE, k_BHSE, causal=causal)
    logsumexp_BHQ = scores_BHQS.logsumexp(dim=-1)
    probabilities = (scores_BHQS - logsumexp_BHQ[..., None]).exp()
    return (probabilities @ v_BHSE.float()).to(q_BHQE.dtype), logsumexp_BHQ


def written_out_backward(
    gradient: Tensor, q_BHQE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, result: Tensor, logsumexp: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`backward` in plain products."""
    k_BHSE, v_BHSE = _to_heads(k_BKSE, q_BHQE).float(), _to_heads(v_BKSE, q_BHQE).float()
    gradient, q_BHQE, dtype = gradient.float(), q_BHQE.float(), q_BHQE.dtype
    probabilities = (_scores(q_BHQE, k_BHSE, causal=causal) - logsumexp[..., None]).exp()
    mean_BHQ = (gradient * result.float()).sum(dim=-1)  # of the probabilities' gradient, under the softmax
    scores_gradient = probabilities * (gradient @ v_BHSE.mT - mean_BHQ[..., None]) / math.sqrt(q_BHQE.shape[3])
    groups = (k_BKSE.shape[1], -1)
    return (
        (scores_gradient @ k_BHSE).to(dtype),
        (scores_gradient.mT @ q_BHQE).unflatten(1, groups).sum(dim=2).to(dtype),
        (probabilities.mT @ gradient).unflatten(1, groups).sum(dim=2).to(dtype),
    )


def _has_flash(query: Tensor) -> bool:
    return query.device.type == "cuda" and query.dtype in _HALF


def _to_heads(x_BKSE: Tensor, query: Tensor) -> Tensor:
    """Every query head's own copy of its key/value head."""
    return x_BKSE.repeat_interleave(query.shape[1] // x_BKSE.shape[1], dim=1)


def _scores(q_BHQE: Tensor, k_BHSE: Tensor, *, causal: bool) -> Tensor:
    scores = q_BHQE.float() @ k_BHSE.float().mT / math.sqrt(q_BHQE.shape[3])
    if not causal:
        return scores
    later = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(diagonal=1)
    return scores.masked_fill(later, -math.inf)
