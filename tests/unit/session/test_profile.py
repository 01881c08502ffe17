"""Asking a run for a profile: the request, the traces, and what is said where there is none."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dtobs.cli import Exit, main
from dtobs.errors import TargetError, UsageError
from dtobs.events import RankState
from dtobs.recording.profiling import Request, answers, ask, read_request, request_path
from dtobs.recording.rundir import RunDirectory, write_json
from dtobs.recording.view import load_run
from dtobs.session import Session
from dtobs.testing.fake_run import FakeRun
from tests.unit.session.conftest import make_model

Attach = Callable[..., Session]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtobs.recording.profiling.AHEAD_SECONDS", 0.0)
    monkeypatch.setattr("dtobs.probes.profiler.LOOK_SECONDS", 0.0)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def asking(run_dir: Path, *arguments: str) -> tuple[threading.Thread, list[int]]:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(main(["profile", str(run_dir), *arguments])))
    thread.start()
    return thread, codes


def test_steps_are_profiled_and_analysed(attach: Attach, capfd: pytest.CaptureFixture[str]):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session = attach(model, optimizer)
    step(model, optimizer)
    thread, codes = asking(session.run_dir, "--steps", "2", "--json", "--timeout", "60")
    deadline = time.monotonic() + 90
    while thread.is_alive() and time.monotonic() < deadline:
        step(model, optimizer)
        time.sleep(0.01)
    thread.join(10)
    for _ in range(2):  # the command may have had its answer within the last step that was profiled
        step(model, optimizer)
    said = capfd.readouterr()
    assert codes == [Exit.NOTHING_FOUND], said.err
    assert list(json.loads(said.out)["ranks"]) == ["0"]
    request = read_request(RunDirectory(session.run_dir))
    assert request is not None
    assert request.last - request.first == 1
    assert f"asked rank 0 for steps {request.first} to {request.last}" in said.err
    traces, refusals = answers(RunDirectory(session.run_dir), request)
    assert refusals == {}
    assert traces[0].stat().st_mode & 0o777 == 0o600
    assert [p.name for p in traces[0].parent.iterdir()] == ["rank-00000.json.gz"]
    steps = load_run(session.run_dir).rank_steps(0)["step"]
    assert steps[-1] > request.last, "training went on"
    assert not torch.autograd.profiler._is_profiler_enabled


def test_a_training_that_profiles_itself_is_left_alone(attach: Attach):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session = attach(model, optimizer)
    step(model, optimizer)
    request = ask(load_run(session.run_dir), 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
        while session._probes.context.step <= request.last:
            step(model, optimizer)
    assert len(theirs.events()) > 0
    assert answers(RunDirectory(session.run_dir), request) == ({}, {0: "the training profiles itself already"})


def test_a_session_that_closes_stops_the_profile(attach: Attach):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session = attach(model, optimizer)
    step(model, optimizer)
    request = ask(load_run(session.run_dir), 50)
    while session._probes.context.step <= request.first + 1:
        step(model, optimizer)
    assert torch.autograd.profiler._is_profiler_enabled
    session.close()
    assert not torch.autograd.profiler._is_profiler_enabled
    assert answers(RunDirectory(session.run_dir), request) == ({}, {})


def test_a_request_of_before_is_over(attach: Attach, tmp_path: Path):
    write_json(tmp_path / "run/profile.json", {"name": "old", "first": 0, "last": 1, "ranks": [0]})
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session = attach(model, optimizer)
    for _ in range(5):
        step(model, optimizer)
    assert answers(RunDirectory(session.run_dir), Request("old", 0, 1, (0,))) == ({}, {})


def prepared(root: Path, world: int = 2, **options: object) -> FakeRun:
    run = FakeRun(root, world, **options)  # type: ignore[arg-type]
    for rank in run.ranks:
        rank.meta("process", profiler=True)
    run.steps(5)
    return run


def test_the_steps_lie_ahead_of_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dtobs.recording.profiling.AHEAD_SECONDS", 2.0)
    run = prepared(tmp_path)
    run.rank(1).step()
    request = ask(run.view(), 3)
    assert (request.first, request.last, request.ranks) == (5 + 20, 5 + 22, (0, 1))  # steps of 100 ms
    assert read_request(run.directory) == request
    assert ask(run.view(), 1, (1,)).ranks == (1,)


def test_slow_first_steps_do_not_bring_the_request_too_near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dtobs.recording.profiling.AHEAD_SECONDS", 2.0)
    run = FakeRun(tmp_path, 2)
    for rank in run.ranks:
        rank.meta("process", profiler=True)
        for forward in (4.0, 2.0, 0.001):
            rank.step(data=0.0, forward=forward, backward=0.0, optimizer=0.0, other=0.0)
        rank.page(step_ns=2 * 10**9)  # a mean that remembers them
    assert ask(run.view(), 1).first >= 300


def test_who_cannot_be_asked_is_told_in_one_line(tmp_path: Path):
    run = prepared(tmp_path / "run")
    for steps in (0, 101):
        with pytest.raises(UsageError, match=f"--steps {steps}: give a number from 1 to 100"):
            ask(run.view(), steps)
    with pytest.raises(UsageError, match="rank 7 is not in the run"):
        ask(run.view(), 1, (7,))
    run.rank(1).page(state=RankState.CLOSED)
    with pytest.raises(UsageError, match="rank 1 has ended; only a run that trains can be profiled"):
        ask(run.view(), 1)
    deaf = FakeRun(tmp_path / "deaf", 2).steps(3)
    with pytest.raises(UsageError, match="ranks 0 and 1 cannot be asked: attached without the probe"):
        ask(deaf.view(), 1)
    empty = FakeRun(tmp_path / "empty", 2)
    with pytest.raises(UsageError, match="has no rank to ask"):
        ask(empty.view(), 1)


@pytest.mark.parametrize(
    "value",
    [
        {"name": "../up", "first": 0, "last": 1, "ranks": [0]},
        {"name": "x", "first": 5, "last": 1, "ranks": [0]},
        {"name": "x", "first": 0, "last": 10**9, "ranks": [0]},
        {"name": "x", "first": "soon", "last": 1, "ranks": [0]},
        {"first": 0},
    ],
)
def test_a_request_that_is_none(tmp_path: Path, value: dict[str, object]):
    run = RunDirectory(tmp_path)
    write_json(request_path(run), value)
    with pytest.raises(TargetError, match="is no request for a profile"):
        read_request(run)


def test_the_command_says_what_is_wrong_and_how_it_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["profile", str(tmp_path), "--ranks", "one"]) == Exit.USAGE
    assert main(["profile", str(tmp_path / "nothing")]) != 0
    assert main(["profile", str(tmp_path), "--timeout", "0"]) == Exit.USAGE
    run = prepared(tmp_path / "run")
    assert main(["profile", str(run.directory.root), "--timeout", "0.01"]) == Exit.ERROR
    said = capsys.readouterr().err.splitlines()
    assert said[-1].endswith("ranks 0 and 1 have no trace: it did not answer in 0 seconds (now in step 4)")
