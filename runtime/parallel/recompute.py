"""Activation checkpointing: keep less of the forward pass, compute it again in the backward one.

full         a block keeps its input only
selective    a block also keeps what is dear to compute again: attention, and every second matrix product
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}
# FSDP2 marks what it does for the profiler, and for experts within a block it does less in the forward pass than when
# that is run again. Marks are neither kept nor asked for.
_MARKS = {
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
}
_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.linear.default}


def apply(block: nn.Module, kind: str) -> nn.Module:
    """The block with recomputation of `kind`; parameter names gain a prefix that `plain_name` removes."""
    if kind == "full":
        return checkpoint_wrapper(block)
    assert kind == "selective"
    checkpoint.SAC_IGNORED_OPS.update(_MARKS)
    return checkpoint_wrapper(block, context_fn=_selective_contexts)


def _selective_contexts() -> Any:
    products: Counter[bool] = Counter()  # forward and recomputation count alike, or they would not agree

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operation in _PRODUCTS:
            products[context.is_recompute] += 1
            keep = products[context.is_recompute] % 2 == 1
        else:
            keep = operation in _ATTENTION
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
