"""Cross-entropy on logits that are cut over the vocabulary: no rank ever holds a whole row.

Per token, the softmax needs the largest logit and the sum of exponentials over all ranks, and the loss the target's
own logit, which one rank has: three small all-reduces of [B·T] instead of gathering [B·T, V].
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _VocabularyParallelLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, group: dist.ProcessGroup) -> Tensor:
        width = logits_NV.shape[1]
        largest_N = logits_NV.max(dim=1).values
        dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=group)
        shifted_NV = logits_NV - largest_N[:, None]
        local_N = targets_N - dist.get_group_rank(group, dist.get_rank()) * width
        mine_N = (local_N >= 0) & (local_N < width)
        local_N = local_N.clamp(0, width - 1)
        target_N = shifted_NV.gather(1, local_N[:, None])[:, 0] * mine_N
        exponentials_NV = shifted_NV.exp_()
        sums = torch.stack((exponentials_NV.sum(dim=1), target_N))
        dist.all_reduce(sums, group=group)
        total_N, target_N = sums
        ctx.save_for_backward(exponentials_NV.div_(total_N[:, None]), local_N, mine_N)
        return (total_N.log() - target_N).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        probabilities_NV, local_N, mine_N = ctx.saved_tensors
        result_NV = probabilities_NV.clone()
        result_NV.scatter_add_(1, local_N[:, None], -mine_N[:, None].to(result_NV.dtype))
        return result_NV.mul_(gradient / len(local_N)), None, None


def vocabulary_parallel_loss(logits_BTV: Tensor, targets_BT: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Mean cross-entropy in FP32; `logits_BTV` is this rank's slice of the vocabulary, in the order of `group`.

    Equal on every rank of `group`, as its gradient is each rank's own slice.
    """
    loss: Tensor = _VocabularyParallelLoss.apply(logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), group)
    return loss
