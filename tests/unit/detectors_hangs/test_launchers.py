"""Launchers that keep their workers, such as Ray, which train in a thread, and kill them when the training is over."""

from __future__ import annotations

import time

import pytest

from dtobs.detectors.hangs.situation import interpret
from dtobs.diagnose import diagnose
from dtobs.diagnose.gather import Evidence
from dtobs.host.process import ProcessState
from dtobs.host.stacks import parse_stacks, training_thread
from dtobs.recording.rank import State
from dtobs.testing.fake_run import FakeRank, FakeRun
from tests.unit.detectors_hangs.trouble import found

GONE = ProcessState(77, alive=False, exit_code=None)


def dissolve(rank: FakeRank, how: str = "dissolved_ns") -> None:
    """It destroys its process groups between two steps, or the thread that trained ends there."""
    rank.meta("process", **{how: time.monotonic_ns()})


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("how", ["dissolved_ns", "thread_ended_ns"])
@pytest.mark.parametrize("code", [None, -15])
def test_ranks_that_are_ended_after_their_training_are_not_dead(training, world: int, how: str, code: int | None):
    run: FakeRun = training(world)
    for rank in run.ranks:
        dissolve(rank, how)
        run.directory.signals(rank.number, 0).write_bytes(bytes([15]))
    ended = ProcessState(77, alive=False, exit_code=code)
    view = run.view(later=3, processes=dict.fromkeys(range(world), ended))
    assert found(view) == {}
    assert {view.rank(rank).state for rank in view.ranks} == {State.EXITED}
    assert diagnose(Evidence(str(view.root), view)).notes == ()


def test_who_leaves_the_others_in_a_call_before_all_are_killed_is_named(training):
    """Its training function raised, which the launcher handled."""
    run: FakeRun = training(2)
    dissolve(run.rank(1))
    run.rank(0).collective("broadcast", wait=True)
    (finding,) = found(run.view(later=3, processes={0: GONE, 1: GONE})).values()
    assert (finding.code, finding.ranks, finding.confidence) == ("rank-exited-early", (1,), "possible")
    assert "which rank 0 waited in; their launcher then ended them all" in finding.summary
    assert "output of the launcher" in finding.next_step


@pytest.mark.parametrize("how", ["trains on", "was seen to be killed"])
def test_who_dies_otherwise_is_dead(training, how: str):
    run: FakeRun = training(2)
    dissolve(run.rank(1))
    if how == "trains on":  # in a group that it has made anew
        run.rank(1).step().collective()
    died = GONE if how == "trains on" else ProcessState(77, alive=False, exit_code=-9)
    (finding,) = found(run.view(later=3, processes={1: died})).values()
    assert (finding.code, finding.ranks) == ("rank-dead", (1,))


def test_a_call_of_the_thread_that_trains_is_none_aside(training):
    run: FakeRun = training(2)
    run.rank(0).meta("process", training_thread=0x7F00, training_thread_id=5).collective(thread=5, wait=True)
    assert interpret(run.view()).calls.missed_aside(0) is None
    assert run.view().rank(0).training_thread == 5


@pytest.mark.parametrize(
    "name", ["Thread 0x00007f45b52f56c0 (most recent call first):", 'Thread 353 (idle): "Thread-9"']
)
def test_the_stack_of_the_thread_that_trains(name: str):
    frames = [f'  File "/me/{file}.py", line 3 in loop' for file in ("train", "main")]
    stacks = parse_stacks("\n".join([name, frames[0], "Thread 0x1 (most recent call first):", frames[1]]))
    seen = training_thread(stacks, 0x7F45B52F56C0, 353)
    assert seen is not None
    assert str(seen.user_frame).startswith("/me/train.py:3")
    assert training_thread(stacks, 0x45B52F56C0, 35) is None
