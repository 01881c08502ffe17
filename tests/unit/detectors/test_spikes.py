"""Leaps of the loss and of the gradient norm, and everything that only looks like one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dtobs.detectors.silent.spikes import spikes
from dtobs.findings import Finding
from dtobs.testing.fake_run import FakeRun

STEPS = 160
Curve = Callable[[int], float]


def falling(step: int) -> float:
    return 2.0 + 3.0 * float(np.exp(-step / 40))


def found(
    root: Path, loss: Curve = falling, norm: Curve = falling, rate: Curve = lambda step: 1e-3, seed: int = 0
) -> list[Finding]:
    run, random = FakeRun(root, 2), np.random.default_rng(seed)
    for step in range(STEPS):
        for rank in run.ranks:
            noise = random.lognormal(0, 0.1, 2)
            rank.step(loss=loss(step) * noise[0], reduced_norm=norm(step) * noise[1], learning_rate=rate(step))
    return spikes(run.view())


def at(step: int, factor: float, length: int = 1) -> Curve:
    return lambda now: falling(now) * (factor if step <= now < step + length else 1.0)


@pytest.mark.parametrize("length", [1, 5])
def test_a_leap_of_the_loss(tmp_path: Path, length: int):
    (one,) = found(tmp_path, loss=at(100, 3.0, length))
    assert one.code == "loss-spike"
    assert 100 <= one.step < 100 + length
    assert "the loss leapt to" in one.summary


def test_a_leap_of_the_gradient(tmp_path: Path):
    (one,) = found(tmp_path, norm=at(100, 30.0))
    assert (one.code, one.step) == ("gradient-spike", 100)


QUIET = {
    "healthy": {},
    "at the beginning": {"loss": at(20, 5.0), "norm": at(20, 50.0)},
    "at the end, not back yet": {"loss": at(STEPS - 1, 5.0), "norm": at(STEPS - 1, 50.0)},
    "a new stage": {"loss": at(90, 2.5, STEPS), "norm": at(90, 20.0, STEPS)},
    "a new learning rate": {"loss": at(90, 2.5, 8), "rate": lambda step: 1e-3 if step < 90 else 5e-3},
    "warm-up": {"rate": lambda step: 1e-5 * (step + 1), "norm": lambda step: 10 / (1 + step / 30)},
    "a larger norm that is not ten times": {"norm": at(100, 4.0)},
    "a batch a little harder": {"loss": at(100, 1.3)},
    "losses near zero": {"loss": lambda step: 0.0},
    "noise": {"loss": lambda step: falling(step) * float(np.exp(0.4 * np.sin(step * 12.9898) * 2))},
    "no numbers": {"loss": lambda step: float("nan"), "norm": lambda step: float("nan")},
}


@pytest.mark.parametrize("name", QUIET)
def test_what_is_no_spike(tmp_path: Path, name: str):
    assert found(tmp_path, **QUIET[name]) == []


@pytest.mark.parametrize("seed", range(3))
def test_noise_alone_is_no_spike(tmp_path: Path, seed: int):
    assert found(tmp_path, seed=seed) == []
