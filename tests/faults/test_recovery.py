"""A hang that passes: the monitor says that it is over, and diagnose does not bring it up again."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from dtobs.diagnose import diagnose, gather
from dtobs.drills.job import Job
from dtobs.recording.journal import read_journal
from dtobs.recording.rundir import RunDirectory
from tests.faults.programs import run_job
from tests.harness import start_ranks

DEADLINE_SECONDS = 60.0


def test_a_suspended_rank_that_is_continued(tmp_path: Path):
    job = Job(tmp_path / "run", "stopped", steps=30, pause=0.2)
    journal = RunDirectory(job.run_dir).findings
    with start_ranks(run_job, 2, job) as group:
        wait_until(lambda: [e.finding.code for e in read_journal(journal)] == ["rank-stopped"])
        group.kill(job.odd, signal.SIGCONT)
        wait_until(lambda: [e.event for e in read_journal(journal)] == ["found", "cleared"])
        assert group.wait(DEADLINE_SECONDS), group.stacks()
        assert [r.value for r in group.results()] == [30, 30]
    assert diagnose(gather(job.run_dir)).findings == ()


def wait_until(condition) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
