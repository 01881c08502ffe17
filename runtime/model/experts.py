"""A mixture of experts in place of the feed-forward layer: each token visits the k experts its router likes best.

Shapes: N tokens, D model width, F hidden width, X experts, k experts a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.config import ModelConfig


class Experts(nn.Module):
    """X SwiGLU layers with their matrices stacked. No routing: tokens arrive sorted by expert."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(config.experts, config.dim, config.ffn))
        self.up = nn.Parameter(torch.empty(config.experts, config.dim, config.ffn))
        self.down = nn.Parameter(torch.empty(config.experts, config.ffn, config.dim))

    def forward(self, x_ND: Tensor, counts_X: Tensor) -> Tensor:
        """`counts_X` says how many rows of `x_ND` belong to each expert, in order; [N, D] → [N, D]."""
        return run_experts(x_ND, counts_X, self.gate, self.up, self.down)


def run_experts(x_ND: Tensor, counts_X: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Each expert on its own rows. An expert without rows still takes part: its gradient is zero, not absent."""
    parts = x_ND.split(counts_X.tolist())
    return torch.cat(
        [
            (F.silu(x @ gate_DF) * (x @ up_DF)) @ down_FD
            for x, gate_DF, up_DF, down_FD in zip(parts, gate, up, down, strict=True)
        ]
    )


class MixtureOfExperts(nn.Module):
    """Route, sort tokens by expert, run the experts, put the results back weighted by the router's probabilities.

    The load-balancing loss is X·Σ f·P of each sample by itself, f the fraction of its visits that went to an expert and
    P the mean probability it gave it (as in DeepSeek-V3): a mean over samples, so it does not depend on the layout.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.per_token = config.experts_per_token
        self.balance_weight = config.balance_loss
        self.router = nn.Linear(config.dim, config.experts, bias=False)
        self.experts: nn.Module = Experts(config)
        self.loss_factor = 1.0  # of the whole loss, where it is scaled before its backward pass
        # From the fractions of the tokens here to those of the whole sequence, where context parallelism cuts it.
        self.over_sequence: Callable[[Tensor], Tensor] = lambda fractions_BX: fractions_BX

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] → [B, T, D]."""
        probabilities_BTX = self.router(x_BTD).float().softmax(dim=-1)
        weights_BTk, chosen_BTk = probabilities_BTX.topk(self.per_token, dim=-1)
        weights_BTk = weights_BTk / weights_BTk.sum(dim=-1, keepdim=True)

        order = chosen_BTk.flatten().argsort(stable=True)  # visits, sorted by expert
        counts_X = torch.bincount(chosen_BTk.flatten(), minlength=probabilities_BTX.shape[-1])
        visitors_ND = x_BTD.flatten(0, 1)[order // self.per_token]
        results_ND = self.experts(visitors_ND, counts_X)
        weighted_ND = results_ND * weights_BTk.flatten()[order, None].to(results_ND.dtype)
        y_BTD = torch.zeros_like(x_BTD.flatten(0, 1)).index_add(0, order // self.per_token, weighted_ND.to(x_BTD.dtype))
        y_BTD = y_BTD.view_as(x_BTD)

        if not self.training or self.balance_weight == 0:
            return y_BTD
        balance = self._balance_loss(probabilities_BTX, chosen_BTk)
        return _AddLoss.apply(y_BTD, balance * (self.balance_weight * self.loss_factor))

    def _balance_loss(self, probabilities_BTX: Tensor, chosen_BTk: Tensor) -> Tensor:
        experts = probabilities_BTX.shape[-1]
        visits_BX = self.over_sequence(F.one_hot(chosen_BTk.flatten(1), experts).float().mean(dim=1))
        return experts * (visits_BX * probabilities_BTX.mean(dim=1)).sum(dim=-1).mean()


class _AddLoss(torch.autograd.Function):
    """Lets an activation carry a second loss: backward starts that loss too. Works on any pipeline stage."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return gradient, gradient.new_ones((), dtype=torch.float32)
