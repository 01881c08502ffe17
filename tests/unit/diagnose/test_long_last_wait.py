"""The last minutes of a job, and what came after it: a long last save, a rank that goes on alone, a run long over."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dtobs.detectors import run_detectors
from dtobs.diagnose import diagnose, gather
from dtobs.diagnose.gather import Evidence
from dtobs.host.process import ProcessState
from dtobs.monitor.loop import Monitor
from dtobs.recording.capture import Capture, RankCapture
from dtobs.recording.journal import history, read_journal
from dtobs.recording.view import RunView
from dtobs.session.last_word import last_word
from dtobs.testing.fake_run import FakeRun


def end(root: Path, *, comes: bool, signal: int) -> FakeRun:
    """A monitor finds that rank 0 waits for rank 1; then rank 1 `comes`, or not, and all close, or are told to end."""
    run = FakeRun(root, 2, start_ns=time.monotonic_ns() - 100_000_000_000).steps(20)
    run.rank(0).phase("backward").collective(wait=True)
    run.rank(1).phase("forward")
    later = 300.0

    def detect(view: RunView) -> list:
        seen = run.view(later=later)
        return run_detectors(seen, ["hangs"])

    monitor = Monitor(run.directory, 0, detect=detect)
    monitor.detect()
    assert [f.code for f in monitor.journal.findings] == ["rank-not-joined"]
    for rank in run.ranks:
        rank.advance(1000)
    if comes:
        run.rank(1).collective()
    run.directory.signals(0, 0).write_bytes(bytes([signal]))
    said = last_word(root, 0, 20, failed=False)
    assert ("found rank-not-joined" in said) != (comes and not signal)
    assert ("stood still for" in said) == (comes and not signal)
    for rank in run.ranks:
        rank.close()
    later = 0.0
    monitor.ranks.read()
    monitor.finish()
    return run


@pytest.mark.parametrize("signal", [0, 15])
@pytest.mark.parametrize("comes", [True, False])
def test_what_came_at_last_and_finished_is_history(tmp_path: Path, comes: bool, signal: int):
    run = end(tmp_path / "run", comes=comes, signal=signal)
    over = comes and signal == 0
    journal = read_journal(run.directory.findings)
    assert [e.finding.code for e in history(journal)] == (["rank-not-joined"] if over else [])
    diagnosis = diagnose(gather(run.directory.root))
    assert [f.code for f in diagnosis.findings] == ([] if over else ["rank-not-joined"])
    assert any(note.startswith("over") for note in diagnosis.notes) == over


@pytest.mark.parametrize("signal", [0, 15])
def test_a_loaders_workers_that_take_long_to_end_as_the_program_does(tmp_path: Path, signal: int):
    """As torch joins those of a loader that keeps its workers and pins memory; nobody waits for anybody."""
    run = FakeRun(tmp_path / "run", 2, start_ns=time.monotonic_ns() - 100_000_000_000).steps(20)
    for rank in run.ranks:
        rank.phase("data")
    later = 300.0
    monitor = Monitor(run.directory, 0, detect=lambda view: run_detectors(run.view(later=later), ["hangs"]))
    monitor.detect()
    assert [f.code for f in monitor.journal.findings] == ["stuck-in-dataloader"]
    run.directory.signals(0, 0).write_bytes(bytes([signal]))
    for rank in run.ranks:
        rank.advance(1000).close()
    later = 0.0
    monitor.ranks.read()
    monitor.finish()
    found = [f.code for f in diagnose(gather(run.directory.root)).findings]
    assert found == ([] if signal == 0 else ["stuck-in-dataloader"])


SHUTDOWN = """\
Thread 0x00007f01 (most recent call first):
  File "/me/train.py", line 7 in upload
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007f02 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 1590 in _shutdown
"""


@pytest.mark.parametrize(
    ("stacks", "doing"),
    [
        (
            SHUTDOWN,
            "waiting for another of its threads to end at /me/train.py:7 in upload; a thread that is no daemon"
            " keeps its process alive",
        ),
        ('Current thread 0x1 (most recent call first):\n  File "/me/train.py", line 90 in <module>\n', "in data"),
    ],
)
def test_a_rank_that_has_not_ended_though_the_others_finished(tmp_path, stacks, doing):
    run = FakeRun(tmp_path / "run", 3)
    run.steps(10)
    for rank in (0, 2):
        run.rank(rank).close()
    run.rank(1).phase("data")
    view = run.view(later=30, processes={1: ProcessState(77, alive=True)})
    view.capture = Capture(
        view.now_ns, "", "asked", {1: RankCapture(1, ProcessState(77, alive=True), stacks_text=stacks)}
    )
    told = diagnose(Evidence("x", view))
    assert told.verdict is None
    assert told.notes[0].startswith(
        f"rank 1 has not ended since the others finished, and nothing has moved for 30 s: rank 1 is {doing}"
    )


@pytest.mark.parametrize("seconds", [2, 40])
def test_a_rank_that_was_ended_long_after_the_others_finished(tmp_path, seconds):
    run = FakeRun(tmp_path / "run", 3)
    run.steps(10)
    for rank in (0, 2):
        run.rank(rank).close()
    run.rank(1).phase("data")
    view = run.view(later=seconds)
    killed = ProcessState(77, alive=False, exit_code=-15, ended_ns=view.now_ns)
    through = {rank: ProcessState(70 + rank, alive=False, exit_code=0, ended_ns=view.now_ns) for rank in (0, 2)}
    view = run.view(later=seconds, processes=through | {1: killed})
    view.capture = Capture(view.now_ns, "", "asked", {1: RankCapture(1, killed, stacks_text=SHUTDOWN)})
    told = diagnose(Evidence("x", view))
    assert told.verdict is None
    if seconds == 2:
        assert "interrupted after step 10: the ranks were killed by SIGTERM" in told.notes
    else:
        assert (
            "rank 1 was killed by SIGTERM 40 s after the others had finished: rank 1 was waiting for another of its"
            " threads to end at /me/train.py:7 in upload; a thread that is no daemon keeps its process alive"
        ) in told.notes


def test_what_came_long_after_a_run_that_is_through_is_not_drawn(tmp_path):
    run = FakeRun(tmp_path, 2).steps(8)
    for rank in run.ranks:
        rank.advance(2.0).close()
    gone = {0: ProcessState(7, alive=False), 1: ProcessState(8, alive=False, exit_code=0)}
    strip = diagnose(Evidence("x", run.view(later=3600, processes=gone))).pictures.strip
    assert strip is not None
    assert strip.quiet_seconds < 10
