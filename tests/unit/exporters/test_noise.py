"""The gradient noise scale: from whole norms where both are known, from the ledger's sketches where they are not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dtobs.exporters.noise import LEAST_LOOKS, LEAST_STEPS, noise_scale
from dtobs.recording.laws import LEDGER, SKETCHES, Side
from dtobs.testing.fake_run import FakeRun

TOKENS = 1024.0
SIGNAL, NOISE = 2.0, 6.0
"""Variance of one piece of a sketch: of what all ranks have in common, and of what is each rank's own."""


def run_of(root: Path, looks: int, *, steps: int = 3, **norms: float) -> FakeRun:
    run = FakeRun(root, world=2)
    for _ in range(steps):
        for rank in run.ranks:
            rank.step(tokens=TOKENS, **norms)
    noise = np.random.default_rng(5)
    for rank in run.ranks:
        rank.meta("layout", data_ranks=[0, 1])
        rank.meta("law", name="ledger", since=0, rows=["a", "b"], sets=[[0, 1]], of=[0, 0], ignored=[])
    record = np.zeros((), LEDGER.dtype)
    for step in range(looks):
        common = noise.normal(0, SIGNAL**0.5, SKETCHES)
        record["step"], record["row"] = step, step % 2
        for rank in run.ranks:
            for side in (Side.LOCAL, Side.FINAL):
                record["side"], record["value"] = side, common + noise.normal(0, NOISE**0.5, SKETCHES)
                rank.recorder.law(LEDGER).append(record)
    return run


def test_sketches_tell_it_where_whole_norms_are_too_few(tmp_path: Path):
    found = noise_scale(run_of(tmp_path, 600).view())
    assert found == pytest.approx(NOISE / SIGNAL * TOKENS, rel=0.2)


def test_a_few_looks_tell_nothing(tmp_path: Path):
    assert noise_scale(run_of(tmp_path, LEAST_LOOKS - 1).view()) is None


def test_whole_norms_are_preferred(tmp_path: Path):
    run = run_of(tmp_path, 600, steps=LEAST_STEPS + 1, local_norm=2.0, reduced_norm=1.5)
    signal = (2048 * 2.25 - 1024 * 4) / 1024
    noise = (4 - 2.25) / (1 / 1024 - 1 / 2048)
    assert noise_scale(run.view()) == pytest.approx(noise / signal)
