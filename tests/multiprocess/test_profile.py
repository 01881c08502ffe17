"""What a job on two ranks is asked: a profile of the same steps, in which collectives match, and its lines of code."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dtobs
from dtobs.cli import Exit, main
from dtobs.detectors.performance.lines import line_of
from dtobs.recording.lines import ask_for_lines
from dtobs.recording.rundir import RunDirectory
from dtobs.recording.view import RunView, load_run
from tests.harness import run_ranks


def train(rank: int, world: int, run_dir: Path, stop: Path) -> None:
    """Until rank 0 is told that the profile has been taken."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    go_on = torch.ones(1)
    with dtobs.attach(model, optimizer, run_dir=run_dir, monitor=False):
        while go_on.item():
            model(torch.ones(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            go_on.fill_(not stop.exists())
            dist.broadcast(go_on, 0)


def test_two_ranks_profile_the_same_steps(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    run_dir, stop = tmp_path / "run", tmp_path / "stop"
    codes: list[int] = []

    def ask() -> None:
        try:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                if (run_dir / "run.json").exists():
                    view = load_run(run_dir)
                    if len(view.pages) == 2 and int(view.pages["steps_done"].min()) >= 3:
                        break
                time.sleep(0.05)
            codes.append(main(["profile", str(run_dir), "--steps", "3", "--json", "--timeout", "60"]))
        finally:
            stop.touch()

    asking = threading.Thread(target=ask)
    asking.start()
    run_ranks(train, 2, run_dir, stop, timeout=150)
    asking.join(10)
    said = capfd.readouterr()
    assert codes and codes[0] in (Exit.NOTHING_FOUND, Exit.WARNING), said.err
    found = json.loads(said.out)
    assert sorted(found["ranks"]) == ["0", "1"]
    traces = sorted((run_dir / "traces").glob("*/rank-*.json.gz"))
    assert [p.name for p in traces] == ["rank-00000.json.gz", "rank-00001.json.gz"]


def train_unevenly(rank: int, world: int, run_dir: Path, stop: Path) -> None:
    """Rank 1 sleeps in each step."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    go_on = torch.ones(1)
    with dtobs.attach(model, optimizer, run_dir=run_dir, monitor=False):
        while go_on.item():
            model(torch.ones(8, 64)).square().mean().backward()
            if rank == 1:
                time.sleep(0.02)  # the line
            optimizer.step()
            optimizer.zero_grad()
            go_on.fill_(not stop.exists())
            dist.broadcast(go_on, 0)


def test_ranks_say_at_which_lines_they_are(tmp_path: Path):
    run_dir, stop = tmp_path / "run", tmp_path / "stop"
    seen: list[RunView] = []

    def ask() -> None:
        try:
            deadline = time.monotonic() + 90
            asked = False
            while time.monotonic() < deadline:
                time.sleep(0.2)
                if not (run_dir / "run.json").exists():
                    continue
                view = load_run(run_dir)
                if len(view.pages) < 2 or int(view.pages["steps_done"].min()) < 3:
                    continue
                if not asked:
                    asked = True
                    ask_for_lines(RunDirectory(run_dir), 7, (1, 0), 3.0)
                if all(view.meta(rank).lines is not None for rank in (0, 1)):
                    seen.append(view)
                    return
        finally:
            stop.touch()

    asking = threading.Thread(target=ask)
    asking.start()
    run_ranks(train_unevenly, 2, run_dir, stop, timeout=150)
    asking.join(10)
    (view,) = seen
    found = line_of(view, 1, (0, 1), 0.5)
    assert found is not None and found.peers_share == 0.0
    file, _, number = found.where.partition(" in ")[0].rpartition(":")
    assert "# the line" in Path(file).read_text().splitlines()[int(number) - 1]
    assert found.where.endswith(" in train_unevenly")
