"""The monitor over real ranks: what it captures of each kind of rank, and that nothing is left when they are gone."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtobs.monitor.address import addresses
from dtobs.recording.capture import Capture, latest_capture
from dtobs.recording.journal import read_journal
from dtobs.recording.rundir import RunDirectory, read_json
from dtobs.recording.view import load_run
from tests.harness import Gate, RankGroup, start_ranks, wait_until_gone

HANG_SECONDS = 2.0


def train(rank: int, world_size: int, root: Path, fault: str) -> str:
    """Ten steps of DDP, then, with a fault, rank 1 does something else than its peer."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import dtobs

    model = DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(rank)  # data of its own
    with dtobs.attach(model, optimizer, run_dir=root, hang_timeout=HANG_SECONDS):
        for step in range(11):
            if step == 10 and rank == 1:
                misbehave(root, fault)
            optimizer.zero_grad()
            model(torch.randn(4, 16)).sum().backward()
            optimizer.step()
    return "done"


def misbehave(root: Path, fault: str) -> None:
    if fault == "gil":
        # Reading an empty pipe with the lock held; unlike sleep(), a signal does not end it.
        ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
    elif fault == "late":
        Gate(root / "at-fault").open()
        Gate(root / "go-on").wait()
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)


def eventually(condition: Callable[[], Any], root: Path, seconds: float = 90.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            log = RunDirectory(root).node(0) / "monitor.log"
            raise AssertionError(f"never happened; the monitor said:\n{log.read_text() if log.exists() else ''}")
        time.sleep(0.05)
    return value


def captured(root: Path) -> Capture:
    return eventually(lambda: latest_capture(root / "captures"), root)


def monitor_pid(root: Path) -> int:
    return eventually(lambda: read_json(root / "monitor.json").get("0"), root)["pid"]


def ranks(root: Path, fault: str) -> RankGroup:
    root.mkdir()
    return start_ranks(train, 2, root, fault)


def test_a_healthy_job_leaves_nothing_behind(tmp_path: Path):
    root = tmp_path / "run"
    with ranks(root, "none") as group:
        pid = monitor_pid(root)
        assert group.wait(120)
        assert [r.value for r in group.results()] == ["done", "done"]
        assert wait_until_gone([pid], timeout=60) == []
    assert read_journal(root / "findings.jsonl") == []
    assert not (root / "captures").exists()
    assert read_json(root / "monitor.json")["0"]["ended"]


def test_gil_held_is_told_from_a_rank_that_waits(tmp_path: Path):
    root = tmp_path / "run"
    with ranks(root, "gil") as group:
        capture = captured(root)
        assert capture.ranks[1].gil == "held"
        assert capture.ranks[0].gil == "free"
        assert any(thread.mentions("misbehave") for thread in capture.ranks[1].stacks)
        assert any(thread.mentions("train") for thread in capture.ranks[0].stacks)
        assert capture.ranks[0].flight_recorder["entries"]
        assert capture.ranks[1].flight_recorder["entries"]
        found = eventually(lambda: read_journal(root / "findings.jsonl"), root)
        assert [(e.finding.code, e.finding.ranks) for e in found] == [("gil-held", (1,))]
        group.kill(1)
        group.wait(30)


def test_a_stopped_rank_is_seen_and_the_finding_cleared_when_it_goes_on(tmp_path: Path):
    root = tmp_path / "run"
    with ranks(root, "stop") as group:
        capture = captured(root)
        assert capture.ranks[1].process.stopped
        assert capture.ranks[0].stacks
        found = eventually(lambda: read_journal(root / "findings.jsonl"), root)
        assert [(e.event, e.finding.code, e.finding.ranks) for e in found] == [("found", "rank-stopped", (1,))]
        group.kill(1, signal.SIGCONT)
        assert group.wait(60)
        assert [r.value for r in group.results()] == ["done", "done"]


def test_a_killed_rank_is_recorded_and_found(tmp_path: Path):
    root = tmp_path / "run"
    with ranks(root, "late") as group:
        Gate(root / "at-fault").wait(90)
        pid = monitor_pid(root)
        group.kill(1, signal.SIGKILL)
        found = eventually(lambda: read_journal(root / "findings.jsonl"), root)
        assert (found[0].finding.code, found[0].finding.ranks) == ("rank-dead", (1,))
        group.wait(60)
    assert load_run(root).processes[1].exit_code == -9
    assert wait_until_gone([pid], timeout=60) == []


def test_the_monitor_killed_does_not_disturb_the_job(tmp_path: Path):
    root = tmp_path / "run"
    with ranks(root, "late") as group:
        Gate(root / "at-fault").wait(90)
        os.kill(monitor_pid(root), signal.SIGKILL)
        Gate(root / "go-on").open()
        assert group.wait(60)
        assert [r.value for r in group.results()] == ["done", "done"]


@pytest.mark.slow
def test_no_monitor_when_it_is_not_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root = tmp_path / "run"
    monkeypatch.setenv("DTOBS_MONITOR", "0")
    with ranks(root, "none") as group:
        assert group.wait(120)
    assert not (root / "monitor.json").exists()
    assert addresses(RunDirectory(root)) == {}
