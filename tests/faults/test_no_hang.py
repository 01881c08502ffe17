"""Real jobs that look hung for longer than their limit and are not: nobody is accused, nothing is captured."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from dtobs.drills.job import Job
from dtobs.recording.journal import read_journal
from dtobs.recording.rundir import RunDirectory
from tests.faults import programs
from tests.faults.programs import paused_job, run_job, still_job
from tests.harness import start_ranks

DEADLINE_SECONDS = 120.0
HANG_TIMEOUT = 2.0  # of paused_job and of Job


def test_a_rank_that_says_it_is_being_debugged(tmp_path: Path):
    run, go = RunDirectory(tmp_path / "run"), tmp_path / "go"
    with start_ranks(paused_job, 2, run.root, go) as group:
        wait_until(lambda: run.monitor_json.exists())
        time.sleep(3 * HANG_TIMEOUT)
        go.touch()
        assert group.wait(DEADLINE_SECONDS), group.stacks()
    nobody_accused(run)


def test_all_ranks_suspended_for_less_than_the_limit(tmp_path: Path):
    job = Job(tmp_path / "run", "none", steps=12, pause=0.25, hang_timeout=5.0)
    run = RunDirectory(job.run_dir)
    with start_ranks(run_job, 2, job) as group:
        wait_until(lambda: run.monitor_json.exists())
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for rank in (0, 1):
                group.kill(rank, number)
            time.sleep(2.5)
        assert group.wait(DEADLINE_SECONDS), group.stacks()
        assert [result.value for result in group.results()] == [12, 12]
    nobody_accused(run)


def test_ranks_that_stand_still_by_themselves_are_hung_within_the_loop_that_trains_and_idle_behind_it(tmp_path: Path):
    inside, behind = (RunDirectory(tmp_path / name) for name in ("inside", "behind"))
    go = tmp_path / "go"
    with (
        start_ranks(still_job, 2, inside.root, go, False) as hung,
        start_ranks(still_job, 2, behind.root, go, True) as idle,
    ):
        wait_until(lambda: read_journal(inside.findings) and behind.monitor_json.exists())
        time.sleep(3 * HANG_TIMEOUT)
        (entry,) = read_journal(inside.findings)
        go.touch()
        assert hung.wait(DEADLINE_SECONDS), hung.stacks()
        assert idle.wait(DEADLINE_SECONDS), idle.stacks()
    assert (entry.finding.code, entry.finding.ranks, entry.finding.confidence) == ("no-progress", (0, 1), "likely")
    assert "in _wait_for" in entry.finding.summary  # a look may meet it between two sleeps
    assert f"within the loop that trains ({programs.__file__}:" in entry.finding.summary
    assert [e.event for e in read_journal(inside.findings)][1:] == ["cleared"], "they went on"
    assert [e.finding.summary for e in read_journal(behind.findings)] == []


def test_eight_ranks_on_two_cores(tmp_path: Path):
    job = Job(tmp_path / "run", "none", steps=15)
    with start_ranks(run_job, 8, job) as group:
        assert group.wait(DEADLINE_SECONDS), group.stacks()
        assert [result.value for result in group.results()] == [15] * 8
    nobody_accused(RunDirectory(job.run_dir))


def nobody_accused(run: RunDirectory) -> None:
    assert [entry.finding.summary for entry in read_journal(run.findings)] == []
    assert list(run.captures.glob("*")) == []


def wait_until(condition) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
