"""What only decays has not been moved; what a gradient moves has, in every format."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dtobs.probes.first_moves import LOOKS, FirstMoves, sample


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(), (7,), (300, 40)])
def test_weight_decay_alone_moves_nothing(dtype: torch.dtype, shape: tuple[int, ...]):
    torch.manual_seed(0)
    weight = torch.nn.Parameter((torch.randn(shape) + 2).to(dtype))
    moves = FirstMoves([3])
    optimizer = torch.optim.AdamW([weight], 3e-2, weight_decay=0.1)
    for step in range(LOOKS // 2):
        moves.add(step, 3, sample(weight).numpy())
        weight.grad = torch.zeros_like(weight) if step < 20 else -torch.ones_like(weight)
        optimizer.step()
    assert 21 <= moves.since[3] <= 24  # a first small update may be lost in BF16
    assert moves.resting == []


def test_what_rests_is_not_looked_at_for_ever():
    moves = FirstMoves([0])
    for step in range(LOOKS):
        assert moves.resting == [0]
        moves.add(step, 0, np.ones(4, np.float32))
    assert moves.resting == []
