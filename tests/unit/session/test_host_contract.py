"""The host contract: dtobs changes no number, breaks nothing when it breaks, and leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import Work
from torch.utils.data import dataloader

import dtobs
from dtobs.events import RankState
from dtobs.probes.base import Probe
from dtobs.probes.table import make_probes
from dtobs.recording.view import load_run
from dtobs.session import Session, probe_set
from tests.unit.session.conftest import make_model, train

Attach = Callable[..., Session]


def hooks(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Everything in this process that a session may touch."""
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith(("c10d::", "_c10d_functional::"))]
    return {
        "modules": [
            {k: len(v) for k, v in vars(m).items() if k.endswith("_hooks") and v is not None} for m in model.modules()
        ],
        "parameters": [
            (len(p._backward_hooks or ()), len(p._post_accumulate_grad_hooks or ())) for p in model.parameters()
        ],
        "optimizer": [len(v) for k, v in vars(optimizer).items() if k.endswith("_hooks")],
        "call": [vars(type(m)).get("__call__") for m in model.modules()],
        "backward": torch.autograd.backward,
        "wait": vars(Work)["wait"],
        "loader": vars(dataloader._BaseDataLoaderIter)["__next__"],
        "coalesced": torch.distributed._broadcast_coalesced,
        "excepthooks": (sys.excepthook, threading.excepthook),
        "exits": (sys.exit, os._exit),
        "wakeup": _wakeup(),
        "dispatcher": [n for n in names if torch._C._dispatch_has_kernel_for_dispatch_key(n, "BackendSelect")],
    }


def _wakeup() -> bool:
    """Whether signals wake a descriptor up."""
    fd = signal.set_wakeup_fd(-1)
    if fd != -1:
        signal.set_wakeup_fd(fd)
    return fd != -1


def test_close_restores_every_hook_exactly(attach: Attach):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before, threads = hooks(model, optimizer), set(threading.enumerate())
    for _ in range(3):
        session = attach(model, optimizer)
        assert hooks(model, optimizer) != before
        train(model, optimizer, 2)
        session.close()
        assert hooks(model, optimizer) == before
        assert set(threading.enumerate()) <= threads  # those of earlier tests may have ended
    session.close()  # again
    assert hooks(model, optimizer) == before


def test_watching_another_model_leaves_the_first(attach: Attach):
    first, second = make_model(), nn.Linear(8, 1)
    one, two = (torch.optim.SGD(m.parameters(), 0.1) for m in (first, second))
    before = hooks(first, one)
    session = attach(first, one)
    session.watch(second, two)
    train(second, two, 3)
    assert hooks(first, one)["optimizer"] == before["optimizer"]
    assert hooks(first, one)["parameters"] == before["parameters"]
    session.close()
    assert hooks(first, one) == before
    assert load_run(session.run_dir).page(0)["steps_done"] == 3


def test_numbers_are_bitwise_the_same(attach: Attach):
    def run(observe: bool) -> tuple[list[float], list[torch.Tensor], torch.Tensor]:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        session = attach(model, optimizer) if observe else None
        losses = train(model, optimizer, 20, accumulate=2)
        if session:
            session.close()
        return losses, [p.detach().clone() for p in model.parameters()], torch.get_rng_state()

    (plain, weights, state), (observed, observed_weights, observed_state) = run(False), run(True)
    assert plain == observed
    assert all(torch.equal(a, b) for a, b in zip(weights, observed_weights, strict=True))
    assert torch.equal(state, observed_state)


class Faulty(Probe):
    """Fails in the one method that it is told to fail in."""

    name = "faulty"
    removed = 0

    def __init__(self, where: str) -> None:
        super().__init__()
        for method in ("install", "step_begin", "batch", "before_optimizer", "after_optimizer", "step_end"):
            if method == where:
                setattr(type(self), method, self._fail)

    @staticmethod
    def _fail(*arguments: object) -> None:
        raise ArithmeticError("this probe is broken")

    def remove(self) -> None:
        type(self).removed += 1


METHODS = ["install", "step_begin", "batch", "before_optimizer", "after_optimizer", "step_end"]


@pytest.mark.parametrize("where", METHODS)
def test_a_failing_probe_is_switched_off_and_training_goes_on(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, where: str
):
    model = make_model()
    expected = train(model, torch.optim.SGD(model.parameters(), 0.1), 4)
    broken = type("Broken", (Faulty,), {})(where)
    monkeypatch.setattr(probe_set, "make_probes", lambda levels, has: [*make_probes(levels, has), broken])
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with attach(model, optimizer) as session:
        session.batch(inputs=torch.ones(1))
        assert train(model, optimizer, 4) == expected
    view = load_run(session.run_dir)
    assert view.page(0)["probe_failures"] == 1
    assert view.meta(0).probes["faulty"]["reason"] == "ArithmeticError: this probe is broken"
    assert len(view.rank_steps(0)) == 4
    assert broken.active is False
    assert broken.removed >= 1


def broken_inside(monkeypatch: pytest.MonkeyPatch, owner: type, method: str) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise ArithmeticError("broken inside")

    monkeypatch.setattr(owner, method, fail)


@pytest.mark.parametrize(
    "method",
    ["begin", "end", "wait_begin", "wait_end", "optimizer_stepped", "start_step", "finish_step", "flush"],
)
def test_a_failure_anywhere_in_the_bookkeeping_reaches_nobody(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, method: str
):
    from dtobs.probes.progress import Progress

    model = make_model()
    expected = train(model, torch.optim.SGD(model.parameters(), 0.1), 4)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = hooks(model, optimizer)
    session = attach(model, optimizer)
    broken_inside(monkeypatch, Progress, method)
    session.step()
    with session.phase("data"):
        session.batch(inputs=torch.ones(1))
    assert train(model, optimizer, 4) == expected
    session.report(loss=1.0)
    session.close()
    assert hooks(model, optimizer) == before


def test_what_fails_while_torch_calls_hooks_is_taken_out_later(attach: Attach, monkeypatch: pytest.MonkeyPatch):
    from dtobs.probes.modules import OptimizerSteps

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = hooks(model, optimizer)
    broken_inside(monkeypatch, OptimizerSteps, "_begin")
    session = attach(model, optimizer)
    seen: list[object] = []
    handle = optimizer.register_step_pre_hook(lambda *_: seen.append(1))  # called after ours, in the same iteration
    train(model, optimizer, 3)
    assert len(seen) == 3
    handle.remove()
    assert hooks(model, optimizer)["optimizer"] == before["optimizer"]
    assert load_run(session.run_dir).meta(0).probes["optimizer"]["reason"] == "ArithmeticError: broken inside"


def test_an_interrupt_passes_and_is_no_failure(attach: Attach):
    with pytest.raises(KeyboardInterrupt), attach() as session:
        raise KeyboardInterrupt
    view = load_run(session.run_dir)
    assert [e["type"] for e in view.meta(0).exceptions] == ["KeyboardInterrupt"]
    assert RankState(view.page(0)["state"]) is RankState.CLOSED


def test_the_model_copies_and_pickles_as_if_nothing_were_attached(attach: Attach):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    keys = list(model.state_dict())
    session = attach(model, optimizer)
    train(model, optimizer, 1)
    twin = copy.deepcopy(model)
    assert list(twin.state_dict()) == list(model.state_dict()) == keys
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again[0].weight, model[0].weight)
    buffer = io.BytesIO()
    torch.save({"model": model, "optimizer": optimizer.state_dict()}, buffer)
    copy.deepcopy(optimizer)
    done = load_run(session.run_dir).page(0)["steps_done"]
    # The copy (an average of the weights, say) is not the model that is watched.
    twin(torch.ones(1, 8))
    assert load_run(session.run_dir).page(0)["step"] == done + 1
    session.close()


def test_disabled_is_nothing_at_all(attach: Attach, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("DTOBS_DISABLE", "1")
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = hooks(model, optimizer)
    with attach(model, optimizer) as session:
        assert hooks(model, optimizer) == before
        session.step(3)
        with session.phase("data"):
            session.batch(inputs=torch.ones(1))
        session.report(loss=1.0)
        session.allow("data", 5)
        session.policy(init="equal")
        session.watch(model, optimizer)
        train(model, optimizer, 1)
    assert session.run_dir == tmp_path / "run"
    assert not session.run_dir.exists()


def test_a_place_that_cannot_be_written_costs_one_line(
    attach: Attach, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "file").write_text("")
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = hooks(model, optimizer)
    session = attach(model, optimizer, run_dir=tmp_path / "file" / "run")
    train(model, optimizer, 1)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"dtobs: not recording this run: cannot make the run directory {session.run_dir}: Not a directory"]
    assert hooks(model, optimizer) == before


def test_an_unknown_level_costs_one_line(attach: Attach, capsys: pytest.CaptureFixture[str]):
    attach(probes={"collectives": "loud"})
    assert capsys.readouterr().err == (
        'dtobs: not recording this run: the level of the probe collectives is \'loud\': use "full", "cheap" or "off"\n'
    )


def test_an_error_of_ours_at_the_start_costs_one_line(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def breaks(*_: object) -> None:
        raise AttributeError("module 'torch' has no attribute 'new'\nand more")

    monkeypatch.setattr("dtobs.session.start.describe_run", breaks)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    attach(model, optimizer)
    train(model, optimizer, 1)
    said = "dtobs: not recording this run: AttributeError: module 'torch' has no attribute 'new'\n"
    assert capsys.readouterr().err == said


def test_attaching_twice_is_attaching_once(attach: Attach, tmp_path: Path):
    session = attach()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert attach(model, optimizer, run_dir=tmp_path / "other") is session
    train(model, optimizer, 2)
    session.close()
    assert load_run(session.run_dir).page(0)["steps_done"] == 2
    assert not (tmp_path / "other").exists()
    again = attach(run_dir=tmp_path / "other")
    assert again is not session


def test_a_session_that_watches_nothing_yet_takes_over_what_the_program_says(attach: Attach):
    session = attach()  # as `dtobs run` does once there is a process group
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    said = {"probes": {"parameters": "off"}, "hang_timeout": 7.0, "config": {"lr": 0.1, "api_key": "x"}}
    assert attach(model, optimizer, **said) is session
    train(model, optimizer, 2)
    assert attach(model, optimizer, hang_timeout=9.0) is session
    session.close()
    view = load_run(session.run_dir)
    assert view.page(0)["hang_timeout_ns"] == 7 * 10**9, "it watches already: what it was told stays"
    assert view.info["config"] == {"lr": 0.1, "api_key": "(hidden)"}
    assert len(view.digests(0)) == 0


def test_an_exception_is_written_down_once_and_raised_on(attach: Attach):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session = attach(model, optimizer)
    train(model, optimizer, 2)
    with pytest.raises(ValueError, match="the tokenizer is gone"), session, session.phase("data"):
        raise ValueError("the tokenizer is gone")
    view = load_run(session.run_dir)
    (found,) = view.meta(0).exceptions
    assert (found["type"], found["message"], found["step"]) == ("ValueError", "the tokenizer is gone", 3)
    assert found["frame"]["file"] == __file__
    assert found["frame"]["function"].startswith("test_an_exception")
    assert found["traceback"][-1] == "ValueError: the tokenizer is gone"
    assert dtobs.events.RankState(view.page(0)["state"]).name == "FAILED"


SCRIPT = """
import json, os, sys, threading, torch
import dtobs
from torch import nn
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
session = dtobs.attach(model, optimizer, run_dir=sys.argv[1], monitor=False)
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward(); optimizer.step()
"""


def run_script(tmp_path: Path, ending: str) -> tuple[subprocess.CompletedProcess[str], dtobs.RunView]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT + ending, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[3],
    )
    return done, load_run(tmp_path / "run")


@pytest.mark.slow
def test_a_script_that_ends_closes_its_session(tmp_path: Path):
    done, view = run_script(tmp_path, "")
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")
    assert view.page(0)["state"] == dtobs.events.RankState.CLOSED
    assert view.page(0)["steps_done"] == 3
    assert json.loads((tmp_path / "run/run.json").read_text())["world_size"] == 1
    sockets = view.meta(0).process["worker_server"]
    assert not Path(sockets).parent.exists()


@pytest.mark.slow
def test_a_script_that_fails_says_so_twice_itself_and_in_the_recording(tmp_path: Path):
    done, view = run_script(tmp_path, "raise RuntimeError('gone wrong')")
    assert done.returncode == 1
    assert done.stderr.count("RuntimeError: gone wrong") == 1
    assert [e["message"] for e in view.meta(0).exceptions] == ["gone wrong"]
    assert view.page(0)["state"] == dtobs.events.RankState.FAILED


@pytest.mark.slow
def test_a_thread_that_dies_is_written_down_and_the_run_goes_on(tmp_path: Path):
    ending = "t = threading.Thread(target=lambda: 1 / 0, name='prefetch'); t.start(); t.join()"
    done, view = run_script(tmp_path, ending)
    assert done.returncode == 0
    assert "ZeroDivisionError" in done.stderr
    assert [(e["type"], e["thread"]) for e in view.meta(0).exceptions] == [("ZeroDivisionError", "prefetch")]
    assert view.page(0)["state"] == dtobs.events.RankState.CLOSED


@pytest.mark.slow
def test_a_killed_script_is_readable(tmp_path: Path):
    done, view = run_script(tmp_path, f"os.kill(os.getpid(), {int(signal.SIGKILL)})")
    assert done.returncode == -signal.SIGKILL
    assert view.page(0)["steps_done"] == 3
    Path(view.meta(0).process["worker_server"]).unlink()


FORK = """
from torch.utils.data import DataLoader, TensorDataset
class OfADevice:
    owner, step, memory, work, issuer, thread = os.getpid(), 1 << 40, (), None, "", 0
    def query(self):
        return False
    def __del__(self):
        if os.getpid() != self.owner:
            os.write(2, b"freed in a fork")
for probe in session._context.probes:
    probe.late.after(OfADevice(), print)
    if probe.name == "conservation":
        probe.waiting[0], probe.under_way[0] = OfADevice(), OfADevice()
pid = os.fork()
if pid == 0:
    model(torch.ones(2, 4)).sum().backward(); optimizer.step()
    session.report(loss=5.0); session.close()
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
pid = os.fork()
if pid == 0:
    with dtobs.attach(model, optimizer, run_dir=sys.argv[1] + "-child", monitor=False):
        model(torch.ones(2, 4)).sum().backward(); optimizer.step()
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
loader = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2, num_workers=1, multiprocessing_context="fork")
for (x,) in loader:
    model(x).sum().backward(); optimizer.step()
"""


@pytest.mark.slow
def test_forked_children_neither_write_nor_close_and_may_attach_for_themselves(tmp_path: Path):
    done, view = run_script(tmp_path, FORK)
    assert (done.returncode, done.stderr) == (0, "")
    assert view.page(0)["steps_done"] == 7
    assert (view.rank_steps(0)["step"] == [1, 2, 3, 4, 5, 6, 7]).all()
    assert view.page(0)["loss"] != 5.0
    assert load_run(tmp_path / "run-child").page(0)["steps_done"] == 1


def test_install_that_fails_is_undone(attach: Attach, monkeypatch: pytest.MonkeyPatch):
    from dtobs.probes.waits import Waits

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = hooks(model, optimizer)
    original = Waits.install

    def half(self: Waits) -> None:
        original(self)
        raise OSError("half way")

    monkeypatch.setattr(Waits, "install", half)
    session = attach(model, optimizer)
    assert hooks(model, optimizer)["wait"] == before["wait"]
    assert load_run(session.run_dir).meta(0).probes["waits"]["reason"] == "OSError: half way"
    session.close()
    assert hooks(model, optimizer) == before


def test_a_closed_session_does_not_keep_the_model(attach: Attach):
    """Neither does a copy that the loop keeps beside it stay for longer than the loop wants it."""
    model = make_model()
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session = attach(model, optimizer)
    train(model, optimizer, 3)
    alive = weakref.ref(average)
    del average
    gc.collect()
    assert alive() is None
    session.close()
    alive = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert alive() is None
    assert not session.active
