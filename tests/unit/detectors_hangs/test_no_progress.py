"""A standstill in which nobody waits for another rank: told inside the loop that trains, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtobs.findings import Finding, Severity
from dtobs.recording.view import RunView
from dtobs.testing.fake_run import FakeRun
from tests.unit.detectors_hangs.trouble import captured, found, stack

IN_LOOP = stack("/usr/lib/python3.11/socket.py:9 readinto", "/home/me/log.py:7 send", "/home/me/train.py:24 main")
BEHIND_IT = stack("/usr/lib/python3.11/socket.py:9 accept", "/home/me/train.py:31 main")
BETWEEN_EPOCHS = stack("/home/me/log.py:7 send", "/home/me/train.py:28 main")
DEBUGGED = stack("/usr/lib/python3.11/pdb.py:9 interaction", "/home/me/train.py:24 main")
ANSWER = "an answer from 10.0.0.7:443"


def _stands(run: FakeRun, stacks: dict[int, str], *, later: float = 75, cores: float = 0.0, waits: str = "") -> RunView:
    for rank in run.ranks:
        for inner, first, last in ((True, 20, 26), (False, 18, 29)):
            rank.meta("loop", file="/home/me/train.py", first=first, last=last, inner=inner)
    view = captured(run.view(later=later), **{f"rank_{rank}": text for rank, text in stacks.items()})
    view.cores = dict.fromkeys(view.ranks, cores)
    assert view.capture is not None
    seen = {rank: replace(each, waits_for=waits) for rank, each in view.capture.ranks.items()}
    view.capture = replace(view.capture, ranks=seen)
    return view


def _told(view: RunView) -> Finding:
    (finding,) = found(view).values()
    assert finding.code == "no-progress"
    return finding


@pytest.mark.parametrize("world", [1, 4])
def test_ranks_that_stand_in_the_loop_that_trains_are_told_with_what_they_wait_for(training, world):
    finding = _told(_stands(training(world), dict.fromkeys(range(world), IN_LOOP), waits=ANSWER))
    assert (finding.ranks, finding.confidence, finding.severity) == (tuple(range(world)), "likely", Severity.WARNING)
    who = "rank 0 is" if world == 1 else "ranks 0-3 are, the first of them,"
    assert finding.summary == (
        f"nothing has moved for 75 s: {who} at /home/me/log.py:7 in send, where it waits for {ANSWER}, "
        "within the loop that trains (/home/me/train.py:20-26)"
    )


def test_in_a_loop_farther_out_it_is_only_possible(training):
    finding = _told(_stands(training(1), {0: BETWEEN_EPOCHS}))
    assert finding.confidence == "possible" and "train.py:18-29" in finding.summary


def test_the_loop_nearest_to_where_it_stands_is_told_though_one_farther_out_has_fewer_lines(training):
    run = training(1)
    run.rank(0).meta("loop", file="/home/me/launch.py", first=4, last=5, inner=False)
    lines = IN_LOOP + '  File "/home/me/launch.py", line 5 in start\n'
    assert "(/home/me/train.py:20-26)" in _told(_stands(run, {0: lines})).summary


def test_a_child_process_may_be_at_work(training):
    assert _told(_stands(training(1), {0: IN_LOOP}, waits="its child process 71 (judge.py)")).confidence == "possible"


def test_who_asks_is_told_earlier(training):
    view = _stands(training(1), {0: IN_LOOP}, later=20)
    assert found(view) == {}
    view.asked = True
    finding = _told(view)
    assert finding.early and finding.confidence == "possible"


@pytest.mark.parametrize(
    ("stacks", "cores", "waits"),
    [
        ((BEHIND_IT,), 0.0, "somebody to connect to it"),
        ((DEBUGGED,), 0.0, ""),
        ((IN_LOOP,), 0.0, "input from the terminal /dev/pts/3"),
        ((IN_LOOP,), 0.9, ""),
        ((IN_LOOP, BEHIND_IT), 0.0, ""),
        ((), 0.0, ""),
    ],
    ids=["behind the loop", "debugged", "asks a person", "works", "one is through", "nobody looked"],
)
def test_healthy_twins(training, stacks, cores, waits):
    run = training(max(1, len(stacks)))
    assert found(_stands(run, dict(enumerate(stacks)), cores=cores, waits=waits)) == {}


def test_who_waits_for_another_rank_is_no_such_matter(training):
    run = training(2)
    run.rank(0).phase("backward").collective(wait=True)
    assert set(found(_stands(run, {0: IN_LOOP, 1: IN_LOOP}))) == {"rank-not-joined"}
