"""Sketches add up, whole and in shards, whatever a tensor's shape."""

from __future__ import annotations

import pytest
import torch

from dtobs.probes import sketches
from dtobs.probes.sketches import Window, sketch, sketch_shard, window

SHAPES = [(), (3,), (320,), (7, 5), (96, 64), (64, 3, 3, 3), (1, 9000)]


def split(tensor: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """The shards of every rank, also the empty ones."""
    flat = tensor if tensor.ndim else tensor.reshape(1)
    found = list(flat.chunk(parts))
    return [*found, *[flat[:0]] * (parts - len(found))]


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_sketch_of_a_sum_is_the_sum_of_the_sketches(shape: tuple[int, ...], parts: int):
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(shape, generator=generator) for _ in range(3)]
    total = torch.stack(gradients).sum(0)
    for step in range(7):
        at = window(shape, parts, step)
        added = torch.stack([sketch(g, at) for g in gradients]).sum(0)
        whole = sketch(total, at)
        assert torch.allclose(whole[:, 1:], added[:, 1:], atol=1e-3)
        for n, part in enumerate(at.parts):
            assert torch.allclose(sketch_shard(split(total, parts)[part], at)[0], whole[n], atol=1e-3)


def test_a_sketch_is_as_large_as_what_it_is_of():
    """Its squares add up to about the squared norm of the window: errors can be measured against it."""
    gradient = torch.randn(2048, 8, generator=torch.Generator().manual_seed(3))
    found = sketch(gradient, window((2048, 8), 1, 0))[0]
    assert 0.9 < float(found[0] / gradient.norm()) < 1.1
    assert 0.3 < float(found[1:].norm() / found[0]) < 2.0


def test_windows_move_and_shards_take_turns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sketches, "ELEMENTS", 64)
    monkeypatch.setattr(sketches, "PARTS", 2)
    seen: list[Window] = [window((64, 8), 5, step) for step in range(50)]
    assert {part for at in seen for part in at.parts} == set(range(5))
    assert len({at.first for at in seen}) > 5
    assert max(len(at.parts) * at.rows * at.columns for at in seen) <= 64


def test_half_precision_and_transposed_gradients():
    gradient = torch.randn(16, 32, generator=torch.Generator().manual_seed(5))
    at = window((16, 32), 1, 0)
    assert torch.allclose(sketch(gradient.t().contiguous().t(), at), sketch(gradient, at), atol=1e-4)
    assert torch.allclose(sketch(gradient.bfloat16(), at), sketch(gradient.bfloat16().float(), at))
