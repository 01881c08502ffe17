"""What one rank does and how it ended, in one word, whoever asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtobs.detectors.hangs.calls import Calls
from dtobs.diagnose.status import statuses
from dtobs.events import Kind, Phase, RankState, identify, phase_name
from dtobs.exporters.sources import RANK_STATES
from dtobs.host.process import ProcessState
from dtobs.recording.meta import Group, Op
from dtobs.recording.rank import State
from dtobs.recording.view import RunView
from dtobs.testing.fake_run import FakeRun
from dtobs.tui.rows import rank_rows

ALIVE = ProcessState(1, alive=True, state="S")


def run_of(root: Path, ranks: int = 2, seconds: float = 0.1) -> FakeRun:
    run = FakeRun(root, ranks)
    for _ in range(3):
        for rank in run.ranks:
            rank.step(forward=seconds)
    return run


def look(run: FakeRun, later: float, **process: ProcessState) -> RunView:
    return run.view(later=later, processes={0: process.get("p0", ALIVE), 1: process.get("p1", ALIVE)})


@pytest.mark.parametrize(
    ("process", "state"),
    [
        (ProcessState(1, alive=True, state="T"), State.SUSPENDED),
        (ProcessState(1, alive=False, exit_code=-9), State.DEAD),
        (ProcessState(1, alive=False, exit_code=None), State.DEAD),
        (ProcessState(1, alive=False, exit_code=7), State.DEAD),
        (ProcessState(1, alive=False, exit_code=-15), State.TERMINATED),
        (ProcessState(1, alive=False, exit_code=-15, oom_killed=True), State.DEAD),
        (ProcessState(1, alive=False, exit_code=-2), State.INTERRUPTED),
        (ProcessState(1, alive=False, exit_code=0), State.EXITED),
    ],
)
def test_what_the_kernel_says(tmp_path: Path, process: ProcessState, state: State):
    rank = look(run_of(tmp_path), 0, p1=process).rank(1)
    assert rank.state is state
    assert rank.moving is process.alive
    assert (rank.silent_seconds is None) is not process.alive


@pytest.mark.parametrize(
    ("heard", "closed", "process", "state", "ending"),
    [
        (2, True, None, State.INTERRUPTED, ""),
        (2, True, ProcessState(1, alive=False), State.INTERRUPTED, "told to end by SIGINT"),
        (2, True, ProcessState(1, alive=False, exit_code=0), State.INTERRUPTED, "exited with code 0"),
        (2, False, ProcessState(1, alive=False), State.INTERRUPTED, "told to end by SIGINT"),
        (0, False, ProcessState(1, alive=False, exit_code=130), State.INTERRUPTED, "exited with code 130"),
        (15, True, ProcessState(1, alive=False, exit_code=0), State.TERMINATED, "exited with code 0"),
        (15, False, ProcessState(1, alive=False), State.TERMINATED, "told to end by SIGTERM"),
        (15, False, ProcessState(1, alive=False, exit_code=-9), State.DEAD, "killed by SIGKILL"),
        (10, True, ProcessState(1, alive=False, exit_code=0), State.FINISHED, "exited with code 0"),
        (0, True, ProcessState(1, alive=False), State.FINISHED, "gone, exit code unknown"),
    ],
)
def test_who_was_told_to_end_did_not_finish(
    tmp_path: Path, heard: int, closed: bool, process: ProcessState | None, state: State, ending: str
):
    run = run_of(tmp_path)
    run.directory.signals(1, 0).write_bytes(bytes([heard]) + bytes(63))
    if closed:
        run.rank(1).close()
    rank = run.view(processes={0: ALIVE, **({1: process} if process else {})}).rank(1)
    assert (rank.state, rank.ending) == (state, ending)


def test_an_interrupt_on_record_says_so_where_no_signal_was_written_down(tmp_path: Path):
    run = run_of(tmp_path)
    run.rank(1).meta("exception", type="KeyboardInterrupt", message="", t_ns=run.rank(1).clock_ns).close()
    assert look(run, 0).rank(1).state is State.INTERRUPTED


@pytest.mark.parametrize(("numbered", "last"), [(False, 3), (True, 4)])
def test_the_step_that_began_by_itself_after_the_last_is_none(tmp_path: Path, numbered: bool, last: int):
    run = run_of(tmp_path, ranks=1)
    run.rank(0).meta("process", steps_numbered=numbered)
    run.rank(0).page(step=4, steps_done=3).close()
    assert run.view(processes={0: ProcessState(1, alive=False, exit_code=0)}).rank(0).step == last


def test_silence_is_measured_in_the_own_steps(tmp_path: Path):
    quick, slow = run_of(tmp_path / "quick"), run_of(tmp_path / "slow", seconds=40)
    assert [look(quick, s).rank(0).state for s in (5, 12)] == [State.RUNNING, State.SILENT]
    assert [look(slow, s).rank(0).state for s in (12, 150)] == [State.RUNNING, State.RUNNING]
    assert look(slow, 500).rank(0).state is State.SILENT


def test_a_long_phase_is_no_silence(tmp_path: Path):
    run = run_of(tmp_path)
    run.rank(0).phase("checkpoint")
    run.rank(1).phase("data")
    assert [r.state for r in look(run, 60).each_rank()] == [State.RUNNING, State.LOADING]


def test_a_wait_is_shown_where_it_is(tmp_path: Path):
    """It has finished its collective and waits for a message of the pipeline."""
    run = run_of(tmp_path)
    receive = Op("recv", shapes=((4,),), dtypes=("float32",))
    for rank in run.ranks:
        rank.collective("all_gather")
    rank = run.rank(0)
    rank.meta("op", id=identify(str(receive)), op="recv", shapes=[[4]], dtypes=["float32"])
    rank.event(Kind.P2P, group=run.group(), seq=502, op=identify(str(receive)), value=1)
    rank.event(Kind.WAIT_BEGIN, group=run.group(), seq=502)
    rank.page(wait_since_ns=rank.clock_ns)
    seen = look(run, 30).rank(0)
    assert seen.state is State.WAITING
    assert str(seen.waits_in) == "recv #502 from rank 1"
    assert str(seen.call).startswith("all_gather")
    assert rank_rows(look(run, 30))[0].doing == "waits in recv from rank 1"


def test_a_call_made_within_a_wait_is_what_is_waited_for(tmp_path: Path):
    """DDP's broadcast of buffers issues its calls after its wait has begun; another thread's are not waited for."""
    run = run_of(tmp_path)
    for rank in run.ranks:
        rank.collective("all_reduce")
    rank = run.rank(0)
    rank.event(Kind.WAIT_BEGIN, group=run.group(), seq=1)
    rank.collective("broadcast").page(wait_since_ns=rank.clock_ns)
    assert str(look(run, 30).rank(0).waits_in).startswith("broadcast")
    rank.collective("all_gather", thread=7).page(wait_since_ns=rank.clock_ns)
    assert str(look(run, 30).rank(0).waits_in).startswith("broadcast")
    assert Calls(run.view()).open_waits[0].seq == 2


def test_who_is_suspended_does_not_wait(tmp_path: Path):
    run = run_of(tmp_path)
    for rank in run.ranks:
        rank.collective(wait=True)
    view = look(run, 30, p1=ProcessState(1, alive=True, state="T"))
    assert [r.state for r in view.each_rank()] == [State.WAITING, State.SUSPENDED]


def test_all_surfaces_use_the_same_word(tmp_path: Path):
    run = run_of(tmp_path)
    run.rank(0).page(state=RankState.CLOSED)
    view = look(run, 0, p1=ProcessState(1, alive=False, exit_code=-15))
    states = [rank.state.value for rank in view.each_rank()]
    assert states == ["finished", "terminated"]
    assert [s.state for s in statuses(view).values()] == states
    assert [row.state for row in rank_rows(view)] == states
    assert set(states) <= set(RANK_STATES)


def test_names_of_phases():
    assert phase_name(Phase.NONE) == ""
    assert phase_name(Phase.BACKWARD) == "backward"
    assert phase_name(40, {40: "evaluate"}) == "evaluate"
    assert phase_name(41) == "phase 41"


def test_a_group_without_a_name_is_told_by_its_size():
    assert str(Group("", (0, 1))) == "unnamed (2 ranks)"
    assert str(Group("3", (0, 1), "tensor")) == "tensor"
