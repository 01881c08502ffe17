"""Replicas with averaged gradients: DistributedDataParallel."""

# Without `from __future__ import annotations`: DDP compares the annotations of a communication hook with the types.

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from runtime.config import PrecisionConfig
from runtime.precision import reduce_dtype


def apply(model: nn.Module, device: torch.device, precision: PrecisionConfig) -> DistributedDataParallel:
    """Wrap a whole model. Gradients are views of the buckets (no copy), which travel in the asked format."""
    wrapped = DistributedDataParallel(
        model, device_ids=[device.index] if device.type == "cuda" else None, gradient_as_bucket_view=True
    )
    if reduce_dtype(precision) is torch.bfloat16:
        wrapped.register_comm_hook(wrapped.process_group, average_in_bf16)
    return wrapped


def average_in_bf16(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of FP32 gradients over `group` in BF16. torch's own such hook takes NCCL only."""
    gradients = bucket.buffer()
    shares = gradients.to(torch.bfloat16).div_(group.size())
    work = dist.all_reduce(shares, group=group, async_op=True)
    assert work is not None

    def widen(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        return gradients.copy_(done.value()[0])

    averaged: torch.futures.Future[Tensor] = work.get_future().then(widen)
    return averaged
