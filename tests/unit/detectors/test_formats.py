"""FP16 that loses gradients and FP8 that loses numbers, and the healthy runs that look a little like them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.detectors.runs import findings, noisy_run, only

NAN = math.nan


def of_all(values: list[float], field: str) -> Callable[[int, int], dict[str, float]]:
    """`field` of every rank at the last steps of forty; NaN before."""
    return lambda rank, step: {field: values[step - 40]} if step >= 40 - len(values) else {field: NAN}


def test_a_loss_scale_that_fell_and_stays_down(tmp_path: Path):
    scales = [65536.0 / 2**step for step in range(16)] + [1.0] * 12
    found = only(noisy_run(tmp_path, 2, change=of_all(scales, "loss_scale")))
    assert (found.code, found.ranks, found.step) == ("fp16-underflow", (0, 1), 30)
    assert found.summary == "the loss scale of ranks 0 and 1 fell to 1 and stays there"


def test_gradients_that_vanish_in_fp16(tmp_path: Path):
    def change(rank: int, step: int) -> dict[str, float]:
        return {"gradient_zeros": (0.7 if rank == 1 else 0.02) if step % 10 == 1 else NAN}

    found = only(noisy_run(tmp_path, 2, change=change))
    assert (found.code, found.ranks, found.step) == ("fp16-underflow", (1,), 31)
    assert found.summary == "70% of the sampled gradients of rank 1 are zero"
    assert found.evidence[0]["gradient_zeros"] == 0.7


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("loss_scale", [1.0] * 40),  # a scaler that is switched off
        ("loss_scale", [4e6 / 2**step for step in range(12)] + [1000.0] * 20),  # finding its scale
        ("loss_scale", [1024.0] * 20 + [1.0] * 5),  # down, and perhaps on its way up again
        ("loss_scale", [1024.0] * 8 + [1.0] * 12 + [2.0] * 8),  # recovered
        ("gradient_zeros", [0.01] * 40),
        ("gradient_zeros", [0.9, 0.02, 0.9]),
        ("gradient_zeros", [0.9, 0.9]),
        ("fp8_saturated_input", [0.0] * 30),
        ("fp8_saturated_input", [0.2, 0.0, 0.2, 0.2]),
        ("fp8_flushed_gradient", [0.1] * 30),  # a tail of small numbers
        ("fp8_amax_gradient", [1e4] * 30),  # large, but it fits: it is scaled
    ],
)
def test_formats_that_fit(tmp_path: Path, field: str, values: list[float]):
    assert findings(noisy_run(tmp_path, 2, change=of_all(values, field))) == []


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("fp8_saturated_gradient", "4% of the FP8 gradients of rank 1 saturate in the sampled layers"),
        ("fp8_flushed_weight", "80% of the FP8 weights of rank 1 become zero in the sampled layers"),
    ],
)
def test_numbers_lost_in_fp8(tmp_path: Path, field: str, text: str):
    share = 0.04 if "saturated" in field else 0.8
    role = field.rsplit("_", 1)[1]

    def change(rank: int, step: int) -> dict[str, float]:
        bad = {field: share, f"fp8_amax_{role}": 12.0}
        return bad if rank == 1 and step >= 20 and step % 5 == 0 else {}

    found = only(noisy_run(tmp_path, 2, change=change))
    assert (found.code, found.ranks, found.summary) == ("fp8-saturation", (1,), text)
    assert found.evidence[0]["amax"] == 12.0
