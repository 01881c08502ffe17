"""Grouped-query attention with rotary positions.

Shapes: B samples, T tokens, D model width, H query heads, K key/value heads, E width of one head (D = H·E).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.config import ModelConfig


def rotary_table(positions_T: Tensor, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each FP32 [T, width/2], of the angles that rotate a head's pairs at these positions."""
    frequencies = theta ** (-torch.arange(0, width, 2, device=positions_T.device, dtype=torch.float32) / width)
    angles = positions_T.to(torch.float32)[:, None] * frequencies[None, :]
    return angles.cos(), angles.sin()


def rotate(x_BTHE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Rotate the pairs (i, i + E/2) of each head: the position enters as an angle (Su et al. 2021)."""
    first, second = x_BTHE.chunk(2, dim=-1)
    cos, sin = cos_TE[:, None, :].to(x_BTHE.dtype), sin_TE[:, None, :].to(x_BTHE.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class CausalAttention(nn.Module):
    """Softmax attention in which a token sees itself and what came before; no parameters.

    A module of its own, so that context parallelism can put a ring in its place.
    """

    def forward(self, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor) -> Tensor:
        """Attend; returns [B, H, T, E]."""
        grouped = q_BHTE.shape[1] != k_BKTE.shape[1]
        return F.scaled_dot_product_attention(q_BHTE, k_BKTE, v_BKTE, is_causal=True, enable_gqa=grouped)


class Attention(nn.Module):
    """Project to queries, keys and values; rotate; attend; project back.

    The number of heads is read off the projections' output: under tensor parallelism a rank has a slice of them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_width = config.dim // config.heads
        key_value_width = config.kv_heads * self.head_width
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, key_value_width, bias=False)
        self.value = nn.Linear(config.dim, key_value_width, bias=False)
        self.core = CausalAttention()
        self.output = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        """[B, T, D] → [B, T, D]."""
        q_BTHE = self.query(x_BTD).unflatten(-1, (-1, self.head_width))
        k_BTKE = self.key(x_BTD).unflatten(-1, (-1, self.head_width))
        v_BTKE = self.value(x_BTD).unflatten(-1, (-1, self.head_width))
        q_BHTE = rotate(q_BTHE, cos_TE, sin_TE).transpose(1, 2)
        k_BKTE = rotate(k_BTKE, cos_TE, sin_TE).transpose(1, 2)
        y_BHTE = self.core(q_BHTE, k_BKTE, v_BTKE.transpose(1, 2))
        return self.output(y_BHTE.transpose(1, 2).flatten(2))
