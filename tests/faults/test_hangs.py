"""Hangs and crashes in real jobs: the right code and rank, nobody else accused, and healthy twins that stay quiet."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from dtobs.diagnose import Diagnosis, diagnose, gather
from dtobs.drills.capabilities import why_unavailable
from dtobs.drills.faults import FAULTS
from dtobs.drills.job import Job
from dtobs.findings import CATALOGUE
from dtobs.host.process import read_process
from dtobs.monitor.capture import capture_ranks
from dtobs.recording.journal import Entry, read_journal
from dtobs.recording.rundir import RunDirectory
from tests.faults.programs import meet_and_run_job, run_job, run_job_and_suspend_rank_2
from tests.harness import RankGroup, start_ranks

DEADLINE_SECONDS = 120.0
_POLL_SECONDS = 0.2

STALLS = [
    *((name, "ddp") for name in ("blocked-loader", "blocked-checkpoint", "absent", "stopped", "early-exit")),
    *((name, "fsdp") for name in ("blocked-loader", "absent", "python-lock")),
    ("absent", "tp"),
    ("absent", "pp"),
    ("python-lock", "ddp"),
    ("uneven-inputs", "ddp"),
    ("dead-link", "ddp"),
    ("dead-link", "pp"),
    ("all-absent", "ddp"),
    ("all-absent", "pp"),
    ("extra-receive", "by-hand"),
    ("crossed-groups", "by-hand"),
    ("skipped-group", "ddp"),
]
if os.environ.get("DTOBS_DRILLS") == "all":
    STALLS = [(f.name, w) for f in FAULTS.values() if f.code and f.needs_stall for w in f.wrappers]
CRASHES = ["killed", "exception"]
SILENT = ["reduce-op", "dtype"]


def hangs(entries: list[Entry]) -> list[Entry]:
    """What the monitor found of the family."""
    return [e for e in entries if CATALOGUE[e.finding.code].family == "hangs"]


def wait_for_finding(run_dir: Path, group: RankGroup) -> list[Entry]:
    """The monitor's findings of the family, as soon as there is one."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        if found := hangs(read_journal(RunDirectory(run_dir).findings)):
            return found
        time.sleep(_POLL_SECONDS)
    raise AssertionError(f"the monitor found nothing\n{diagnose(gather(run_dir))}\n{group.stacks()}")


def repeated(name: str, wrapper: str) -> bool:
    """Whether a fault runs under DDP by default, and this is the same on FSDP2 or tensor parallel."""
    return wrapper in ("fsdp", "tp") and (name, "ddp") in STALLS


def of_family(diagnosis: Diagnosis) -> list[tuple[str, tuple[int, ...]]]:
    return [(f.code, f.ranks) for f in diagnosis.findings if CATALOGUE[f.code].family == "hangs"]


@pytest.mark.parametrize(
    ("name", "wrapper", "world"),
    [
        *(
            pytest.param(name, wrapper, 2, marks=pytest.mark.exhaustive if repeated(name, wrapper) else ())
            for name, wrapper in STALLS
            if FAULTS[name].point != "rendezvous"
        ),
        ("absent", "ddp", 3),
        ("order", "ddp", 3),
    ],
)
def test_a_hang_is_found_live_and_diagnosed(tmp_path: Path, name: str, wrapper: str, world: int):
    fault = FAULTS[name]
    if fault.needs and (why := why_unavailable(fault.needs)):
        pytest.skip(why)
    job = Job(tmp_path / "run", name, wrapper)  # type: ignore[arg-type]
    with start_ranks(run_job, world, job) as group:
        live = wait_for_finding(job.run_dir, group)
        diagnosis = diagnose(gather(job.run_dir, capture_ranks))
    # Of two ranks that disagree neither is the odd one; of three, one is.
    expected = [(fault.code, (job.odd,) if fault.names == "odd" or world > 2 else (0, 1))]
    assert [(e.finding.code, e.finding.ranks) for e in live] == expected
    assert of_family(diagnosis) == expected
    assert diagnosis.verdict is not None


def test_a_rendezvous_that_a_rank_does_not_come_to_is_found_live_and_diagnosed(tmp_path: Path):
    job = Job(tmp_path / "run", "no-rendezvous", "by-hand")
    with start_ranks(meet_and_run_job, 2, job, init_pg=False) as group:
        live = wait_for_finding(job.run_dir, group)
        diagnosis = diagnose(gather(job.run_dir, capture_ranks))
    assert [(e.finding.code, e.finding.ranks) for e in live] == [("rendezvous-incomplete", (1,))]
    assert of_family(diagnosis) == [("rendezvous-incomplete", (1,))]
    assert diagnosis.verdict is not None
    assert "tests/faults/programs.py" in diagnosis.verdict.summary, "the line that waits"


def test_parameters_that_a_rank_leaves_out_are_named(tmp_path: Path):
    job = Job(tmp_path / "run", "unused-parameters")
    with start_ranks(run_job, 3, job) as group:
        assert group.wait(DEADLINE_SECONDS), group.stacks()
    diagnosis = diagnose(gather(job.run_dir))
    assert of_family(diagnosis) == [("unused-parameters", (job.odd,))], diagnosis.findings
    assert diagnosis.verdict is not None
    assert "in step 7 left 2 parameters without a gradient, the first of them aside.weight" in (
        diagnosis.verdict.summary
    )


def test_two_faults_at_once_are_both_named(tmp_path: Path):
    """One rank's storage blocks, another is suspended: neither hides the other, and the third is not accused."""
    job = Job(tmp_path / "run", "blocked-loader", mark=tmp_path / "struck")
    with start_ranks(run_job, 3, job) as group:
        wait_for_file(tmp_path / "struck")
        group.kill(2, signal.SIGSTOP)
        wait_for_finding(job.run_dir, group)
        diagnosis = diagnose(gather(job.run_dir, capture_ranks))
    assert sorted(of_family(diagnosis)) == [("rank-stopped", (2,)), ("stuck-in-dataloader", (1,))]


def test_an_exception_beside_a_suspended_rank_is_still_the_verdict(tmp_path: Path):
    job = Job(tmp_path / "run", "exception", mark=tmp_path / "struck", hang_timeout=30.0)
    with start_ranks(run_job_and_suspend_rank_2, 3, job) as group:
        entries = wait_for_finding(job.run_dir, group)
        assert read_process(group.pids[2]).stopped
        diagnosis = diagnose(gather(job.run_dir))
    assert [e.finding.code for e in entries] == ["uncaught-exception"]
    assert of_family(diagnosis) == [("uncaught-exception", (1,))]


def wait_for_file(path: Path) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(_POLL_SECONDS)


def test_all_ranks_suspended_and_continued_is_no_finding(tmp_path: Path):
    job = Job(tmp_path / "run", "none", steps=20, pause=0.1, hang_timeout=DEADLINE_SECONDS)
    with start_ranks(run_job, 2, job) as group:
        wait_for_file(job.run_dir / "run.json")
        for sig, stopped in ((signal.SIGSTOP, True), (signal.SIGCONT, False)):
            for rank in (0, 1):
                group.kill(rank, sig)
            deadline = time.monotonic() + DEADLINE_SECONDS
            while any(read_process(pid).stopped != stopped for pid in group.pids):
                assert time.monotonic() < deadline
                time.sleep(_POLL_SECONDS)
            time.sleep(1.5)  # a look of the monitor, which ticks every second
        assert group.wait(DEADLINE_SECONDS), group.stacks()
    assert read_journal(RunDirectory(job.run_dir).findings) == []
    assert diagnose(gather(job.run_dir)).findings == ()


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", CRASHES)
def test_a_crash_is_diagnosed_and_its_victims_are_not_accused(tmp_path: Path, name: str, wrapper: str):
    job = Job(tmp_path / "run", name, wrapper)  # type: ignore[arg-type]
    with start_ranks(run_job, 3, job) as group:
        assert group.wait(DEADLINE_SECONDS), group.stacks()
        diagnosis = diagnose(gather(job.run_dir))
    assert of_family(diagnosis) == [(FAULTS[name].code, (job.odd,))], diagnosis.findings


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_different_shapes_are_told_from_the_abort_they_cause(tmp_path: Path, wrapper: str):
    job = Job(tmp_path / "run", "shape", wrapper)  # type: ignore[arg-type]
    with start_ranks(run_job, 3, job) as group:
        group.wait(15)  # Gloo aborts or hangs, as it happens
        diagnosis = diagnose(gather(job.run_dir, capture_ranks))
    assert of_family(diagnosis) == [("shape-mismatch", (job.odd,))], diagnosis.findings
    assert diagnosis.verdict is not None
    assert "float32[8]" in diagnosis.verdict.summary


@pytest.mark.parametrize("name", SILENT)
def test_disagreements_that_nobody_notices_are_found(tmp_path: Path, name: str):
    job = Job(tmp_path / "run", name)
    with start_ranks(run_job, 3, job) as group:
        assert group.wait(DEADLINE_SECONDS), group.stacks()
        assert [r.exitcode for r in group.results()] == [0, 0, 0]
    assert of_family(diagnose(gather(job.run_dir))) == [(FAULTS[name].code, (job.odd,))]


@pytest.mark.parametrize("world", [2, 3])
def test_a_call_too_many_is_found_before_it_hangs_the_end(tmp_path: Path, world: int):
    job = Job(tmp_path / "run", "extra-call", steps=16)
    with start_ranks(run_job, world, job) as group:
        group.wait(5)  # the odd rank waits in its last step for peers that have finished
        diagnosis = diagnose(gather(job.run_dir, capture_ranks))
    assert of_family(diagnosis) == [("call-site-mismatch", (job.odd,))], diagnosis.findings
    assert diagnosis.verdict is not None
    assert "made one call more than" in diagnosis.verdict.summary
    assert " in reduce_once_more met the one at " in diagnosis.verdict.summary


@pytest.mark.parametrize(
    ("wrapper", "job"),
    [
        ("ddp", {"steps": 30}),
        ("fsdp", {"steps": 30}),
        ("ddp", {"steps": 5, "pause": 1.0, "hang_timeout": 3.0}),  # slow is not hung
    ],
    ids=["ddp", "fsdp", "slow"],
)
def test_healthy_twins_have_no_finding(tmp_path: Path, wrapper: str, job: dict[str, float]):
    healthy = Job(tmp_path / "run", "none", wrapper, **job)  # type: ignore[arg-type]
    with start_ranks(run_job, 2, healthy) as group:
        assert group.wait(DEADLINE_SECONDS), group.stacks()
        assert [r.value for r in group.results()] == [healthy.steps] * 2
    assert read_journal(RunDirectory(healthy.run_dir).findings) == []
    assert diagnose(gather(healthy.run_dir)).findings == ()
