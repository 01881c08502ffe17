"""The fake run is read back by the real readers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dtobs.events import STEP_PARTS, Phase
from dtobs.recording.meta import Parameter
from dtobs.recording.view import load_run
from dtobs.testing.fake_run import FakeRun


def test_steps_are_partitions_of_their_wall_time(tmp_path: Path):
    view = FakeRun(tmp_path, world=3).steps(4, forward=0.2).view()
    window = view.steps()
    assert (view.ranks, window.steps.tolist(), view.world_size) == ([0, 1, 2], [0, 1, 2, 3], 3)
    parts = sum(window.records[f"{part}_ns"] for part in STEP_PARTS)
    assert (parts == window.records["end_ns"] - window.records["begin_ns"]).all()
    assert (window.records["forward_ns"] == 200_000_000).all()


def test_a_rank_that_waits_in_a_collective(tmp_path: Path):
    run = FakeRun(tmp_path).steps(1)
    run.rank(0).collective(wait=True)
    run.rank(1).phase("data")
    view = run.view(later=60)
    assert view.page(1)["phase"] == Phase.DATA
    assert view.now_ns - view.page(0)["wait_since_ns"] == 60_000_000_000
    (group,) = view.groups().values()
    assert group.ranks == (0, 1)


def test_digests_follow_the_table(tmp_path: Path):
    run = FakeRun(tmp_path, world=1).steps(1)
    run.rank(0).parameters(Parameter("weight", (2, 2), "float32", "ddp:0")).digests(2**64 - 1)
    record = run.view().digests(0)[0]
    assert (int(record["step"]), record["digest"].tolist()) == (0, [2**64 - 1])


def test_dead_runs_are_read_without_looking_at_this_host(tmp_path: Path):
    FakeRun(tmp_path, world=2, live=False).steps(1)
    assert load_run(tmp_path).processes == {}


def test_unknown_fields_are_named(tmp_path: Path):
    rank = FakeRun(tmp_path, world=1).rank(0)
    with pytest.raises(TypeError, match="a step has no field 'lost'"):
        rank.step(lost=1)
    with pytest.raises(TypeError, match="a page has no field 'lost'"):
        rank.page(lost=1)
    assert np.isnan(rank.recorder.page.get("loss"))


def test_a_value_that_comes_late_reaches_its_step(tmp_path: Path):
    run = FakeRun(tmp_path, world=1).steps(3)
    recorder = run.rank(0).recorder
    assert recorder.amend_step(1, local_norm=7.0, nonfinite=3)
    assert not recorder.amend_step(3, local_norm=7.0)
    window = run.view().steps()
    assert window.field("local_norm").tolist() == [[1.0, 7.0, 1.0]]
    assert window.records["nonfinite"].tolist() == [[0, 3, 0]]
