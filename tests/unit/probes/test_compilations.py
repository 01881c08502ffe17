"""Compiling is a part of the step, whatever phase it interrupts."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

import dtobs
from dtobs.events import STEP_PARTS
from dtobs.recording.view import load_run

SLEEP = 0.05


def slow(graph: Any, _inputs: Any) -> Any:
    """A compiler that does nothing, for a while."""
    time.sleep(SLEEP)
    return graph.forward


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def train(folder: Path, steps: int = 6, inside: str = "", reset: int = -1) -> npt.NDArray[np.void]:
    net = nn.Linear(4, 4)
    model: Any = torch.compile(net, backend=slow)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    with dtobs.attach(model, optimizer, run_dir=folder, monitor=False) as session:
        for step in range(steps):
            if step == reset:
                torch._dynamo.reset()
            optimizer.zero_grad()
            if inside:
                with session.phase(inside):
                    model(torch.ones(3 + step, 4))
            net(torch.ones(3, 4)).sum().backward() if inside else model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
    view = load_run(folder)
    assert view.page(0)["probe_failures"] == 0
    records = view.rank_steps(0)
    wall = records["end_ns"] - records["begin_ns"]
    np.testing.assert_array_equal(sum(records[f"{part}_ns"] for part in STEP_PARTS), wall)
    return records


def test_the_first_call_is_compiling(tmp_path: Path):
    records = train(tmp_path)
    assert records["compile_ns"][0] > SLEEP * 1e9
    assert records["forward_ns"][0] < records["compile_ns"][0]  # however busy the machine is
    assert (records["compile_ns"][1:] == 0).all()


def test_a_compiler_that_was_reset_is_listened_to_again(tmp_path: Path):
    records = train(tmp_path, steps=8, reset=4)
    assert (records["compile_ns"] > SLEEP * 1e9).sum() >= 1
    assert records["compile_ns"][-1] == 0
    (tmp_path / "again").mkdir()
    torch._dynamo.reset()
    assert train(tmp_path / "again")["compile_ns"][0] > SLEEP * 1e9, "by a session that begins after it"


def test_a_validation_that_compiles_is_validation(tmp_path: Path):
    records = train(tmp_path, inside="validation")
    assert (records["compile_ns"] == 0).all()
    assert records["validation_ns"].max() > SLEEP * 1e9


def test_another_compiler_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch._dynamo.callback", ModuleType("another"))
    assert (train(tmp_path)["compile_ns"] == 0).all()


def test_nobody_listens_after_the_session(tmp_path: Path):
    from torch._dynamo.callback import callback_handler

    train(tmp_path)
    assert (callback_handler.start_callbacks, callback_handler.end_callbacks) == ([], [])


def test_a_thread_that_compiles_beside_the_training_is_no_part_of_it(tmp_path: Path):
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    beside = torch.compile(nn.Linear(4, 4), backend=slow)
    with dtobs.attach(net, optimizer, run_dir=tmp_path, monitor=False):
        thread = threading.Thread(target=beside, args=(torch.ones(2, 4),))
        for step in range(6):
            if step == 2:
                thread.start()
            optimizer.zero_grad()
            loss = net(torch.ones(3, 4)).sum()
            time.sleep(SLEEP / 2)
            loss.backward()
            optimizer.step()
        thread.join()
    assert (load_run(tmp_path).rank_steps(0)["compile_ns"] < SLEEP * 1e9 / 2).all()
