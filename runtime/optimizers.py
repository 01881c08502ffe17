"""AdamW with weight decay on matrices only, fused where torch has a fused kernel."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from runtime.config import OptimizerConfig


def named_parameters(parts: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    """Trainable parameters of all model parts by their name in the plain model (wrappers' prefixes removed)."""
    return {
        plain_name(name): parameter
        for part in parts
        for name, parameter in part.named_parameters()
        if parameter.requires_grad
    }


def plain_name(name: str) -> str:
    """`module.layers.0._orig_mod.norm.weight` → `layers.0.norm.weight`."""
    wrappers = {"module", "_orig_mod", "_checkpoint_wrapped_module"}
    return ".".join(part for part in name.split(".") if part not in wrappers)


def build(
    named: dict[str, nn.Parameter], config: OptimizerConfig, learning_rate: float, *, fused: bool = True
) -> torch.optim.AdamW:
    """AdamW over `named`, at the peak `learning_rate`. Norm weights and biases (1-D) are not decayed."""
    matrices = [parameter for parameter in named.values() if parameter.ndim >= 2]
    vectors = [parameter for parameter in named.values() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=fused,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = value
