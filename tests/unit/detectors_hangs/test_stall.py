"""When a run counts as stalled: the floor, the run's own pace, the phases, and what is no stall at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtobs.detectors.hangs.stall import quiet_period, stall, stood_until_ns
from dtobs.events import RankState
from dtobs.findings import Finding
from dtobs.host.process import ProcessState
from dtobs.recording.capture import Capture, RankCapture
from dtobs.testing.fake_run import FakeRun


def test_a_run_that_moves_is_not_stalled(tmp_path: Path):
    run = FakeRun(tmp_path).steps(20)
    assert stall(run.view(later=59)) is None


def test_silence_beyond_the_default_floor(tmp_path: Path):
    run = FakeRun(tmp_path).steps(20)
    found = stall(run.view(later=61))
    assert found is not None
    assert found.seconds == pytest.approx(61)
    assert (found.threshold_seconds, found.why, found.ranks) == (60, "the default hang timeout", (0, 1))


def test_one_moving_rank_is_enough(tmp_path: Path):
    run = FakeRun(tmp_path).steps(20)
    run.rank(0).collective(wait=True)
    run.rank(1).advance(70).phase("data")
    assert stall(run.view(later=59)) is None


def test_hang_timeout_is_the_floor(tmp_path: Path):
    run = FakeRun(tmp_path).steps(20)
    run.rank(0).page(hang_timeout_ns=5_000_000_000)
    assert stall(run.view(later=4)) is None
    found = stall(run.view(later=6))
    assert found is not None
    assert found.why == "the hang timeout"


def test_slow_steps_raise_the_threshold(tmp_path: Path):
    run = FakeRun(tmp_path).steps(20, forward=30)
    found = quiet_period(run.view(later=100))
    assert found is not None
    assert not found.exceeded
    assert found.threshold_seconds == pytest.approx(4 * 30.06, rel=0.01)
    assert stall(run.view(later=130)) is not None


def test_one_slow_first_step_does_not(tmp_path: Path):
    run = FakeRun(tmp_path).steps(1, forward=300).steps(10)
    assert stall(run.view(later=61)) is not None


@pytest.mark.parametrize(
    ("phase", "factor"),
    [("startup", 8), ("compile", 30), ("validation", 5), ("checkpoint", 8), ("forward", 1)],
)
def test_long_phases_have_their_allowance(tmp_path: Path, phase: str, factor: int):
    run = FakeRun(tmp_path).steps(5)
    run.rank(0).collective(wait=True)
    run.rank(1).phase(phase)
    assert stall(run.view(later=60 * factor - 1)) is None
    assert stall(run.view(later=60 * factor + 1)) is not None


def test_the_first_step_may_take_longer(tmp_path: Path):
    run = FakeRun(tmp_path)
    for rank in run.ranks:
        rank.phase("forward")
    assert stall(run.view(later=299)) is None
    assert stall(run.view(later=301)) is not None


def test_a_declared_phase_counts(tmp_path: Path):
    run = FakeRun(tmp_path).steps(5)
    run.rank(1).phase("evaluate").page(phase_allowance_ns=3600 * 10**9)
    assert stall(run.view(later=3599)) is None
    assert stall(run.view(later=3601)) is not None


def test_a_finished_run_is_not_stalled(tmp_path: Path):
    run = FakeRun(tmp_path).steps(5)
    for rank in run.ranks:
        rank.close()
    assert quiet_period(run.view(later=10_000)) is None


def test_a_failed_or_dead_rank_need_not_move(tmp_path: Path):
    run = FakeRun(tmp_path, world=3).steps(5)
    run.rank(0).close(RankState.FAILED)
    found = stall(run.view(later=61, processes={1: ProcessState(1, alive=False, exit_code=-9)}))
    assert found is not None
    assert found.ranks == (2,)


def test_a_dead_run_is_judged_at_its_capture(tmp_path: Path):
    run = FakeRun(tmp_path, live=False).steps(5)
    view = run.view(later=10_000)
    assert stall(view) is None
    moved = silence_start = max(rank.clock_ns for rank in run.ranks)
    alive = {rank: RankCapture(rank, ProcessState(1, alive=True, state="S")) for rank in (0, 1)}
    view.capture = Capture(moved + 70 * 10**9, "", "stalled", alive)
    found = stall(view)
    assert found is not None
    assert found.seconds == pytest.approx(70, abs=1)
    view.capture = Capture(silence_start - 10**9, "", "stalled", alive)
    assert stall(view) is None, "the run moved on after the capture"


def test_no_ranks_no_stall(tmp_path: Path):
    assert quiet_period(FakeRun(tmp_path).view(later=1000)) is None


def test_a_hang_lasts_until_the_step_that_it_began_in_is_done(tmp_path: Path):
    run = FakeRun(tmp_path / "run", 2).steps(3)
    began_ns = run.ranks[0].clock_ns + 10_000_000
    hang = Finding("rank-not-joined", "rank 1 has not joined", (1,), since_ns=began_ns)
    assert stood_until_ns(run.view(), hang) == 0
    for rank, parts in zip(run.ranks, ({"exposed": 25.0}, {"other": 25.0}), strict=True):
        rank.step(**parts).step()
    assert stood_until_ns(run.view(), hang) / 1e9 == pytest.approx(began_ns / 1e9 + 25, abs=0.2)
