"""checkpoint-failed: a save that raised is found, though the loop goes on; one that succeeds later clears it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dtobs
from dtobs.detectors.silent.checkpoint_failed import checkpoint_failed
from dtobs.findings import Confidence
from dtobs.recording.view import load_run
from dtobs.testing.fake_run import FakeRun

FULL = "OSError: [Errno 28] No space left on device"


def failing(run: FakeRun, rank: int, failures: int, **fields) -> None:
    said = {"function": "torch.save", "site": 0, "error": FULL if failures else "", "ranks": [], "step": 4, "t_ns": 1}
    run.rank(rank).meta("save", failures=failures, **said | fields)


def test_a_save_that_failed_and_none_after_it(tmp_path):
    run = FakeRun(tmp_path, 3).steps(5)
    failing(run, 1, 1)
    (finding,) = checkpoint_failed(run.view())
    assert (finding.code, finding.ranks, finding.step) == ("checkpoint-failed", (1,), 4)
    assert finding.confidence is Confidence.CERTAIN
    assert finding.summary == f"rank 1 could not save a checkpoint in step 4, in torch.save: {FULL}"
    failing(run, 1, 2)
    assert "2 times or more since one was saved" in checkpoint_failed(run.view())[0].summary


def test_a_save_that_succeeds_later_makes_it_history(tmp_path):
    run = FakeRun(tmp_path, 2).steps(5)
    assert checkpoint_failed(run.view()) == []
    failing(run, 0, 1)
    failing(run, 0, 0)
    assert checkpoint_failed(run.view()) == []


def test_of_a_distributed_save_the_ranks_that_could_not_do_their_part_are_named(tmp_path):
    run = FakeRun(tmp_path, 4).steps(5)
    for rank in range(4):  # torch raises on all of them
        failing(run, rank, 1, ranks=[2])
    assert [finding.ranks for finding in checkpoint_failed(run.view())] == [(2,)]


def test_a_save_that_waited_for_others_does_not_ask_for_room(tmp_path):
    run = FakeRun(tmp_path, 2).steps(5)
    failing(run, 0, 1, error="RuntimeError: gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1")
    assert checkpoint_failed(run.view())[0].next_step.startswith("The save waited for other ranks")
    failing(run, 1, 1)
    assert "Make room" in checkpoint_failed(run.view())[0].next_step


def save(path: str) -> None:
    torch.save({"step": 1}, path)


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_strangers_loop_on_a_full_disk(tmp_path: Path, goes_on: bool):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = torch.save, dcp.save
    with dtobs.attach(model, optimizer, run_dir=tmp_path / "run", monitor=False):
        for step in range(4):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            try:
                raise ValueError("what the loop handles meanwhile is nobody's failed save")
            except ValueError:
                save(str(tmp_path / "good.pt"))
            if step == 2:
                with pytest.raises((OSError, RuntimeError)):
                    torch.save(model.state_dict(), "/dev/full")
        if not goes_on:
            torch.save(model.state_dict(), tmp_path / "another line.pt")
    assert (torch.save, dcp.save) == before
    (finding,) = checkpoint_failed(load_run(tmp_path / "run"))
    assert (finding.ranks, finding.step) == ((0,), 4)
    assert "in torch.save at " in finding.summary
    assert "test_checkpoint_failed.py:" in finding.summary
    assert load_run(tmp_path / "run").page(0)["probe_failures"] == 0


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_failed_distributed_save_is_one_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_args, **_named):
        raise OSError(errno.ENOSPC, "No space left on device")

    with dtobs.attach(run_dir=tmp_path / "run", monitor=False) as session:
        session.step(7)
        monkeypatch.setattr(dcp.FileSystemWriter, "write_data", refuse)
        with pytest.raises(dcp.api.CheckpointException):
            dcp.save({"weight": torch.ones(4)}, checkpoint_id=tmp_path / "saved", no_dist=True)
    (finding,) = checkpoint_failed(load_run(tmp_path / "run"))
    assert (finding.ranks, finding.step) == ((0,), 7)
    assert "in torch.distributed.checkpoint.save at " in finding.summary
    assert finding.summary.endswith("No space left on device")
