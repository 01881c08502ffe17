"""Where a step's time went."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtobs.testing.fake_run import FakeRun
from dtobs.timeline.partition import partition


def test_the_parts_add_up_to_the_wall_time(tmp_path: Path):
    run = FakeRun(tmp_path, 2)
    for rank in run.ranks:
        for step in range(5):
            fields = {"exposed": 0.05, "exposed_data_ns": 10e6, "exposed_pipeline_ns": 15e6, "validation": 0.1 * step}
            rank.step(None, **fields)
    found = partition(1, run.view().rank_steps(1))
    assert found is not None
    assert (found.rank, found.steps) == (1, 5)
    assert sum(found.parts.values()) == pytest.approx(found.wall, abs=1e-9)
    assert found.parts["data communication"] == pytest.approx(0.010)
    assert found.parts["pipeline wait"] == pytest.approx(0.015)
    assert found.parts["communication"] == pytest.approx(0.025), "what no group's name explains is not lost"
    assert found.busy == pytest.approx(found.wall - 0.05)


def test_small_parts_are_not_said(tmp_path: Path):
    run = FakeRun(tmp_path, 1)
    run.steps(3)
    found = partition(0, run.view().rank_steps(0))
    assert found is not None
    assert found.line() == ("100 ms a step: data 1%, forward 40%, backward 50%, data communication 5%, optimizer 4%")


def test_no_steps(tmp_path: Path):
    run = FakeRun(tmp_path, 1)
    run.rank(0)
    assert partition(0, run.view().rank_steps(0)) is None
