"""The transformer: embedding, blocks of attention and feed-forward around a residual stream, norm, output head.

Shapes: B samples, T tokens, D model width, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.config import ModelConfig
from runtime.model.attention import Attention, rotary_table
from runtime.model.experts import MixtureOfExperts


class FeedForward(nn.Module):
    """SwiGLU: a gated linear unit with SiLU (Shazeer 2020)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] → [B, T, D]."""
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nn.Module):
    """One layer: attention, then feed-forward, each on the normalised stream and added back to it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_epsilon)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=config.norm_epsilon)
        self.feed_forward: nn.Module = (
            MixtureOfExperts(config) if config.experts else FeedForward(config.dim, config.ffn)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        """[B, T, D] → [B, T, D]."""
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), cos_TE, sin_TE))
        return x_BTD + self.dropout(self.feed_forward(self.feed_forward_norm(x_BTD)))


class Transformer(nn.Module):
    """Tokens to next-token logits.

    A pipeline stage is the same model with the other stages' layers taken out: `embedding`, `norm` and `head` may be
    None, and `layers` keeps the numbers of the whole model, so parameter names are the same in every layout.
    """

    def __init__(self, config: ModelConfig, sequence: int) -> None:
        super().__init__()
        self.config = config
        self.sequence = sequence
        self.positions_T: Tensor | None = None  # of this rank's tokens; None: 0 … T − 1
        self.embedding: nn.Embedding | None = nn.Embedding(config.vocabulary, config.dim)
        self.layers = nn.ModuleDict({str(number): Block(config) for number in range(config.layers)})
        self.norm: nn.RMSNorm | None = nn.RMSNorm(config.dim, eps=config.norm_epsilon)
        self.head: nn.Linear | None = nn.Linear(config.dim, config.vocabulary, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """Token numbers [B, T] (a later pipeline stage: activations [B, T, D]) → logits [B, T, V] (or activations).

        T is `sequence`, or the local part of it; it is not read off activations, which sequence parallelism shards.
        """
        positions_T = self.positions_T
        if positions_T is None:
            positions_T = torch.arange(self.sequence, device=x.device)
        cos_TE, sin_TE = rotary_table(positions_T, self.config.dim // self.config.heads, self.config.rope_theta)
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.layers.values():
            x = block(x, cos_TE, sin_TE)
        if self.norm is not None:
            x = self.norm(x)
        return self.head(x) if self.head is not None else x


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross-entropy in FP32, in nats a token; a scalar."""
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())
