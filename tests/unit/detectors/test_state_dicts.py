"""State dicts that a model does not take, and ones that a thread saves while they are trained."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dtobs
from dtobs.detectors import run_detectors
from dtobs.findings import Finding
from dtobs.recording.view import load_run

State = dict[str, torch.Tensor]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def renamed(prefix: str) -> State:
    return {prefix + name: tensor for name, tensor in net().state_dict().items()}


class Part(nn.Module):
    """A model that has another in it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = net(), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))


class Renames(nn.Module):
    """A model that takes the names of another by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self._register_load_state_dict_pre_hook(self._rename)

    def _rename(self, state: State, prefix: str, *_: Any) -> None:
        for name in list(state):
            state["inner." + name] = state.pop(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def train(tmp_path: Path, model: nn.Module, load: Callable[[nn.Module], object], during: Any = None) -> list[Finding]:
    """What is found of a training that `load` comes before, with `during` called in its fourth step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with dtobs.attach(model, optimizer, run_dir=tmp_path / "run", monitor=False):
        load(model)
        for step in range(8):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
            if step == 3 and during is not None:
                during(model)
        if during is not None:
            during(None)
    view = load_run(tmp_path / "run")
    assert view.page(0)["probe_failures"] == 0
    return run_detectors(view)


@pytest.mark.parametrize(
    ("make", "state", "said"),
    [
        (net, renamed("module."), "taken none of the 4 entries that it was given: its names begin with 'module.'"),
        (Part, net().state_dict(), "none of the 4 entries that it was given: the model's names begin with 'backbone.'"),
        (Part, renamed("old.") | nn.Linear(2, 2).state_dict(prefix="head."), "taken 2 of the 6 entries"),
        (net, {"encoder": torch.zeros(3)}, "the model has no encoder; 4 tensors kept the values"),
    ],
    ids=["wrapped", "inside", "in-part", "other"],
)
def test_what_a_model_did_not_take_is_told(tmp_path: Path, make: Callable[[], nn.Module], state: State, said: str):
    if said.startswith("taken 2"):
        state = {name.replace("old.", "old.backbone."): tensor for name, tensor in state.items()}
    (finding,) = train(tmp_path, make(), lambda model: model.load_state_dict(state_dict=state, strict=False))
    assert (finding.code, finding.ranks, finding.severity) == ("resume-mismatch", (0,), "critical")
    assert said in finding.summary
    assert f"strict=False) at {__file__}:" in finding.summary


def test_a_loop_that_loads_in_each_step_is_told_of_a_few_times(tmp_path: Path):
    model, target = net(), net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with dtobs.attach(model, optimizer, run_dir=tmp_path / "run", monitor=False):
        for _ in range(40):
            target.load_state_dict(renamed("module."), strict=False)
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
    assert len(load_run(tmp_path / "run").meta(0).unloaded) == 16


def twice(model: nn.Module) -> None:
    """As a program does that tries one name after the other."""
    model.load_state_dict(renamed("module."), strict=False)
    model.load_state_dict(renamed(""), strict=False)


def in_parts(model: Any) -> None:
    model.load_state_dict(renamed("module."), strict=False)
    model[0].load_state_dict(nn.Linear(3, 4).state_dict())


@pytest.mark.parametrize(
    ("make", "load"),
    [
        (net, twice),
        (net, in_parts),
        (net, lambda model: model.load_state_dict({}, strict=False)),
        (net, lambda model: model.load_state_dict(renamed(""))),
        (net, lambda model: model.load_state_dict(strict=False, state_dict=renamed("") | {"old": torch.ones(1)})),
        (Part, lambda model: model.load_state_dict(renamed("backbone."), strict=False)),  # its head is new
        (net, lambda model: model.load_state_dict(Part().state_dict() | renamed(""), strict=False)),  # a stage's part
        (Renames, lambda model: model.load_state_dict(renamed(""), strict=False)),
    ],
    ids=["twice", "in-parts", "nothing", "strict", "one-more", "new-head", "a-part", "renames"],
)
def test_a_model_that_took_what_it_needs_is_not_told_of(tmp_path: Path, make: Any, load: Any):
    assert train(tmp_path, make(), load) == []


class Slow(io.BytesIO):
    """A file that takes what is written once it is told to."""

    def __init__(self, go: threading.Event) -> None:
        super().__init__()
        self.begun, self.go = threading.Event(), go

    def write(self, data: Any) -> int:
        self.begun.set()
        self.go.wait(60)
        return super().write(data)


@pytest.mark.parametrize(("what", "at_once"), [("state", False), ("model", False), ("copies", False), ("state", True)])
def test_what_is_trained_while_a_thread_saves_it(tmp_path: Path, what: str, at_once: bool):
    go, threads = threading.Event(), []

    def during(model: nn.Module | None) -> None:
        """Begins to save; with None, the training is at its end."""
        if model is None or at_once:
            go.set()
        if model is not None:
            file, state = Slow(go), {"model": model.state_dict(), "step": 4}
            saved = {"state": state, "model": model, "copies": copy.deepcopy(state)}[what]
            threads.append(threading.Thread(target=lambda: torch.save(saved, file)))
            threads[0].start()
            assert file.begun.wait(60)
        if model is None or at_once:
            threads[0].join()

    found = train(tmp_path, net(), lambda model: None, during)
    if what == "copies" or at_once:
        assert found == []
        return
    (finding,) = found
    assert (finding.code, finding.ranks, finding.severity) == ("checkpoint-race", (0,), "critical")
    assert finding.summary.startswith(f"rank 0 saved a checkpoint in another thread (at {__file__}:")
    assert (
        "stepped 4 times, in step 5 and after it: 4 tensors of it were no copy but what is trained" in finding.summary
    )
