"""Attention block by block: each kernel agrees with the written-out form, and merging does not depend on the cut."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from runtime.parallel import blockwise


def inputs(queries: int, keys: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, 8), (2, 4, queries, 8)]
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


@pytest.mark.parametrize(("queries", "keys", "causal"), [(6, 6, True), (6, 6, False), (6, 3, False)])
def test_the_kernel_and_the_written_out_form_agree(queries: int, keys: int, causal: bool) -> None:
    q, k, v, gradient = inputs(queries, keys)
    result, logsumexp = blockwise.forward(q, k, v, causal=causal)
    written, written_logsumexp = blockwise.written_out(q, k, v, causal=causal)
    torch.testing.assert_close(result, written, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logsumexp, written_logsumexp, rtol=1e-5, atol=1e-5)
    found = blockwise.backward(gradient, q, k, v, result, logsumexp, causal=causal)
    expected = blockwise.written_out_backward(gradient, q, k, v, result, logsumexp, causal=causal)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_merged_blocks_are_the_whole(cut: int) -> None:
    q, k, v, _ = inputs(6, 6)
    parts = [(k[:, :, :cut], v[:, :, :cut]), (k[:, :, cut:], v[:, :, cut:])]
    merged, logsumexp = blockwise.merge(*(blockwise.forward(q, *part, causal=False) for part in parts))
    whole, whole_logsumexp = blockwise.forward(q, k, v, causal=False)
    torch.testing.assert_close(merged, whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logsumexp, whole_logsumexp, rtol=1e-5, atol=1e-5)
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-5)
