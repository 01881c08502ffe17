"""Runs in trouble, in a few lines each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dtobs.testing.fake_run import FakeRun


@pytest.fixture
def training(tmp_path: Path) -> Callable[..., FakeRun]:
    """`training(world)`: a healthy run that has done 20 steps, one collective each."""

    def make(world: int = 2, **options: object) -> FakeRun:
        run = FakeRun(tmp_path / "run", world, **options)  # type: ignore[arg-type]
        for _ in range(20):
            for rank in run.ranks:
                rank.step().collective()
        return run

    return make
