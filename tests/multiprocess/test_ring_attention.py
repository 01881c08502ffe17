"""Ring attention on real ranks gives what attention over the whole sequence gives, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from runtime.parallel.context import RingAttention, positions
from tests.harness import run_ranks

TOKENS = 24


def attend(rank: int, world: int, dtype: torch.dtype, query_heads: int) -> list[float]:
    """Largest absolute differences of this rank's result and of its three gradients to those of one process."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, TOKENS, 16) for heads in (query_heads, 2, 2, query_heads)]
    *inputs, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    mine = positions(TOKENS, rank, world)
    whole = [x.clone().requires_grad_() for x in inputs]
    grouped = query_heads != 2
    expected = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=grouped)
    expected.backward(weight)
    local = [x[:, :, mine].clone().requires_grad_() for x in inputs]
    found = RingAttention(dist.group.WORLD)(*local)
    found.backward(weight[:, :, mine])
    pairs = [(found, expected), *((x.grad, y.grad) for x, y in zip(local, whole, strict=True))]
    return [_difference(x, y[:, :, mine]) for x, y in pairs]


def _difference(x: Tensor, y: Tensor) -> float:
    return float((x.float() - y.float()).abs().max())


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("query_heads", [2, 6], ids=["one-to-one", "grouped"])
def test_it_is_attention(world: int, query_heads: int) -> None:
    for result in run_ranks(attend, world, torch.float32, query_heads):
        assert max(result.value) < 1e-5


def test_it_is_attention_in_bf16_within_its_rounding() -> None:
    for result in run_ranks(attend, 2, torch.bfloat16, 4):
        assert max(result.value) < 0.05
