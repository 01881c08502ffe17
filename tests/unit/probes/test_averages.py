"""Copies that a loop keeps beside its model: which are found, when they are looked at, and when they are let go."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import dtobs
from dtobs.probes.averages import FIRST_LOOKS, copies_of, looks_every
from dtobs.recording.laws import AVERAGES, AVERAGES_PIECES
from dtobs.recording.view import load_run


@pytest.fixture(autouse=True)
def _nothing_left():
    """What other tests have left for the garbage collector is found as well."""
    gc.collect()


class Net(nn.Module):
    """A few layers, with a buffer that moves."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, 9), nn.Linear(9, 5), nn.BatchNorm1d(5))
        self.head = nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> Any:
        self.seen += 1.0
        return self.head(self.body(x))


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


FOUND: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "ema of torch": (AveragedModel, "AveragedModel"),
    "deep copy": (lambda m: copy.deepcopy(m).requires_grad_(False), "Net"),
    "copy of a part": (lambda m: copy.deepcopy(m.body), "Sequential"),
    "copy in a wrapper": (lambda m: nn.ModuleDict({"x": nn.Linear(2, 2), "ema": copy.deepcopy(m)}), "Net"),
    "dict of parameters": (lambda m: {n: p.detach().clone() for n, p in m.named_parameters()}, "a dict"),
    "dict of the state": (state, "a dict"),
    "ordered dict": (lambda m: OrderedDict(state(m)), "a OrderedDict"),
    "list": (lambda m: [p.detach().clone() for p in m.parameters()], "a list"),
}
NOT_FOUND: dict[str, Callable[[nn.Module], Any]] = {
    "its own state": lambda m: dict(m.state_dict()),
    "its own parameters": lambda m: list(m.parameters()),
    "views of them": lambda m: [p.detach() for p in m.parameters()],
    "gradients": lambda m: [p.grad for p in m.parameters()],
    "another size": lambda m: Net(4),
    "half of it": lambda m: [p.detach().clone() for p in m.parameters()][:3],
    "numbers": lambda m: [p.sum().item() for p in m.parameters()],
    "plans": lambda m: [p.detach().to("meta").clone() for p in m.parameters()][:2],
    "one that is trained": lambda m: with_gradients(copy.deepcopy(m)),
}


def with_gradients(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


@pytest.mark.parametrize("name", FOUND)
def test_a_copy_is_found(name: str):
    model = Net()
    make, label = FOUND[name]
    kept = make(model)
    found = [each for each in copies_of(model, set()) if each.tensors()]
    assert [each.label for each in found] == [label]
    assert len(found[0].tensors()) in (len(list(model.parameters())), len(model.state_dict()), 6)
    assert kept is not None


@pytest.mark.parametrize("name", NOT_FOUND)
def test_what_is_none_is_not_found(name: str):
    model = with_gradients(Net())
    kept = NOT_FOUND[name](model)
    assert [each for each in copies_of(model, set()) if each.of_model] == []
    assert kept is not None


@pytest.mark.parametrize("name", FOUND)
def test_a_copy_that_its_owner_lets_go_is_let_go(name: str):
    model = Net()
    kept = FOUND[name][0](model)
    (found,) = copies_of(model, set())
    last = weakref.ref(found.tensors()[-1][1])
    del kept
    assert found.tensors() == []
    gc.collect()
    assert last() is None


def test_a_list_that_grows_while_copies_are_looked_for_is_none(monkeypatch: pytest.MonkeyPatch):
    """As that of the modules which are found."""
    monkeypatch.setattr("dtobs.probes.averages._objects", lambda counts: ([], [[0] * 77, {}]))
    assert list(copies_of(Net(), set())) == []


def test_looks_become_fewer_and_are_the_same_for_every_rank():
    looks = [step for step in range(100_000) if step % looks_every(step, 2) == 0]
    assert looks[:FIRST_LOOKS] == [2 * n for n in range(FIRST_LOOKS)]
    assert len(looks) < AVERAGES.capacity / 4
    assert max(later / sooner for sooner, later in itertools.pairwise(looks[FIRST_LOOKS:])) < 1.04


@pytest.mark.parametrize("keep", ["ema", "frozen"])
def test_what_moves_is_written_down(tmp_path: Path, keep: str):
    torch.manual_seed(0)
    model = Net()
    kept = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if keep == "ema" else copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with dtobs.attach(model, optimizer, run_dir=tmp_path, monitor=False):
        for _ in range(12):
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if keep == "ema":
                kept.update_parameters(model)
            kept(torch.randn(4, 8))
    view = load_run(tmp_path)
    assert view.pages["probe_failures"].tolist() == [0]
    said = view.meta(0).laws["averages"]["copies"]
    assert [(each["label"], each["used"]) for each in said] == [
        ("", False),
        ("AveragedModel" if keep == "ema" else "Net", True),
    ]
    assert said[0]["pieces"] == ["seen"]
    assert said[1]["pieces"][0] == ("module.body.0.weight" if keep == "ema" else "body.0.weight")
    records = view.law(AVERAGES, 0)
    assert (records["copy"] == 0).sum() >= 10  # the buffer that counts
    moves = records[records["copy"] == 1]
    assert len(moves) == (11 if keep == "ema" else 0)
    if keep == "ema":
        assert (moves["digest"][:, :6] != 0).all()
        assert not moves["digest"][:, 8:].any()
        assert len(np.unique(moves["digest"][:, 0])) == len(moves)


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own imports
def test_a_copy_that_is_compiled_in_mid_run_is_compiled_as_without_us(tmp_path: Path):
    model = Net()
    kept = copy.deepcopy(model).requires_grad_(False).eval()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    call = Net.__call__
    with dtobs.attach(model, optimizer, run_dir=tmp_path, monitor=False):
        for step in range(12):
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
            if step == 3:
                faster = torch.compile(kept, backend=backend)
            if step > 3:
                faster(torch.randn(4, 8))
    assert Net.__call__ is call
    assert len(graphs) == 1
    view = load_run(tmp_path)
    assert view.pages["probe_failures"].tolist() == [0]
    assert [each["used"] for each in view.meta(0).laws["averages"]["copies"]] == [False, True]


def test_of_many_tensors_each_piece_is_several():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(50)))
    kept = copy.deepcopy(model)
    (found,) = copies_of(model, set())
    assert len(found.tensors()) == 100 > AVERAGES_PIECES
    assert kept is not None


class Distiller(nn.Module):
    """A loss that holds the model and its teacher."""

    def __init__(self, student: Net, teacher: Net) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher
        self.again = self.teacher

    def forward(self, x: torch.Tensor) -> Any:
        return (self.student(x) - self.teacher(x).detach()).square().sum()


def distil(folder: Path, *, moves: bool = False, called: bool = True) -> list[tuple[str, str]]:
    """What the run says of a teacher of another size, which lies beside the model that is watched."""
    torch.manual_seed(0)
    loss = Distiller(Net(8), Net(8))
    loss.teacher.body[0] = nn.Linear(8, 13)
    loss.teacher.body[1] = nn.Linear(13, 5)
    nn.init.ones_(loss.teacher.head.bias)
    optimizer = torch.optim.SGD(loss.student.parameters(), 0.01)
    with dtobs.attach(loss.student, optimizer, run_dir=folder, monitor=False):
        for _ in range(12):
            x = torch.randn(4, 8)
            (loss(x) if called else loss.student(x).square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if moves:
                loss.teacher.head.weight.data += 0.1
    view = load_run(folder)
    assert view.pages["probe_failures"].tolist() == [0]
    copies = view.meta(0).laws["averages"]["copies"]
    assert [each["rests"] for each in copies[:-1]] == [[]]
    assert copies[-1]["label"] == "Net"
    return [tuple(each) for each in copies[-1]["rests"]]


def test_of_a_frozen_network_of_another_size_it_is_said_what_it_holds(tmp_path: Path):
    said = dict(distil(tmp_path / "first"))
    assert set(said) == {
        f"{layer}.{kind}" for layer in ("body.0", "body.1", "body.2", "head") for kind in ("weight", "bias")
    }
    assert {name for name, digest in said.items() if not digest} == {"body.2.weight", "body.2.bias", "head.bias"}
    assert dict(distil(tmp_path / "again")) == said


@pytest.mark.parametrize("how", [{"moves": True}, {"called": False}])
def test_of_a_network_that_moves_or_that_nobody_calls_nothing_is_said(tmp_path: Path, how: dict[str, bool]):
    assert distil(tmp_path, **how) == []
