"""Norm, clipping, the guard against non-finite gradients, and the loss scale, on one process."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from runtime.config import OptimizerConfig, PrecisionConfig
from runtime.errors import NonFiniteError
from runtime.gradients import NonFiniteGuard, clip_factor, global_norm, scale_gradients
from runtime.optimizers import build, plain_name, set_learning_rate
from runtime.precision import LossScale


def parameters(*gradients: list[float]) -> list[nn.Parameter]:
    made = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros(len(gradient)))
        parameter.grad = torch.tensor(gradient)
        made.append(parameter)
    return made


def test_clipping_brings_the_global_norm_to_the_limit() -> None:
    made = [*parameters([3.0, 0.0], [0.0, 4.0]), nn.Parameter(torch.zeros(1))]
    norm = float(global_norm(made))
    assert norm == pytest.approx(5.0)
    scale_gradients(made, clip_factor(norm, 1.0))
    assert float(global_norm(made)) == pytest.approx(1.0, rel=1e-5)
    assert clip_factor(0.5, 1.0) == clip_factor(100.0, 0.0) == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_shows_in_the_norm(bad: float) -> None:
    assert not math.isfinite(float(global_norm(parameters([1.0, 2.0], [bad, 0.0]))))


def test_the_guard_skips_counts_and_stops_at_the_limit() -> None:
    guard = NonFiniteGuard(limit=3)
    assert [guard.check(norm, step) for step, norm in enumerate([1.0, math.nan, math.inf, 2.0], 1)] == [
        *(True, False, False, True)
    ]
    assert (guard.in_row, guard.total) == (0, 2)
    guard.check(math.nan, 5)
    guard.check(math.nan, 6)
    with pytest.raises(NonFiniteError, match=r"nan in 3 steps in a row, up to step 7; .* those of step 4"):
        guard.check(math.nan, 7)


def test_halving_the_loss_scale_is_tried_to_its_end_before_the_guard_stops() -> None:
    guard, scale = NonFiniteGuard(limit=3), LossScale.of(PrecisionConfig(compute="fp16", loss_scale=16.0))
    for step in range(1, 5):
        assert not guard.check(math.nan, step, loss_scale=scale.value)
        scale.update(finite=False)
    with pytest.raises(NonFiniteError, match=r"nan in 5 steps in a row, up to step 5; .* those of step 0"):
        guard.check(math.nan, 5, loss_scale=scale.value)


def test_the_loss_scale_halves_and_doubles_in_fp16_only() -> None:
    scale = LossScale.of(PrecisionConfig(compute="fp16", loss_scale=8.0, scale_window=2))
    for finite, expected in [(False, 4.0), (True, 4.0), (True, 8.0), (True, 8.0), (False, 4.0)]:
        scale.update(finite=finite)
        assert scale.value == expected
    fixed = LossScale.of(PrecisionConfig(compute="bf16"))
    fixed.update(finite=False)
    assert fixed.value == 1.0


def test_vectors_are_not_decayed() -> None:
    named = {"w": nn.Parameter(torch.ones(2, 2)), "norm": nn.Parameter(torch.ones(2))}
    optimizer = build(named, OptimizerConfig(weight_decay=0.1), 1.0)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays == {id(named["w"]): 0.1, id(named["norm"]): 0.0}
    set_learning_rate(optimizer, 0.25)
    assert {group["lr"] for group in optimizer.param_groups} == {0.25}


def test_names_lose_their_wrappers() -> None:
    wrapped = "module.layers.0._orig_mod._checkpoint_wrapped_module.norm.weight"
    assert plain_name(wrapped) == "layers.0.norm.weight"
