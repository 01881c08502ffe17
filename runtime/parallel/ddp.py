"""Replicas with averaged gradients: DistributedDataParallel."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def apply(model: nn.Module, device: torch.device) -> DistributedDataParallel:
    """Wrap a whole model. Gradients are views of the buckets (no copy)."""
    return DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )
