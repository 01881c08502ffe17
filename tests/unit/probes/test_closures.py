"""Steps that are given a closure, as Lightning's trainer and LBFGS do: what is read is what the closure has made."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dtobs
from dtobs.detectors import run_detectors
from dtobs.recording.laws import LEDGER, UPDATES, Side
from dtobs.recording.view import RunView, load_run

STEPS = 8


def train(run_dir: Path | None, *, named: bool = False, micros: int = 1, lbfgs: bool = False) -> list[float]:
    """The losses of `STEPS` steps; the last of `micros` micro-batches runs in the closure."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    parameters = list(model.parameters())
    optimizer: Any = torch.optim.LBFGS(parameters, max_iter=3) if lbfgs else torch.optim.AdamW(parameters, 1e-2)
    session = (
        dtobs.attach(model, optimizer, run_dir=run_dir, monitor=False, probes={"ledger": "all"}) if run_dir else None
    )
    losses = []
    for step in range(STEPS):
        batches = [torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + n)) for n in range(micros)]
        optimizer.zero_grad()
        for batch in batches[:-1]:
            (model(batch).square().mean() / micros).backward()

        def closure(batch: torch.Tensor = batches[-1]) -> torch.Tensor:
            if lbfgs:
                optimizer.zero_grad()
            time.sleep(0.01)
            loss = model(batch).square().mean() / micros
            loss.backward()
            return loss

        loss = optimizer.step(closure=closure) if named else optimizer.step(closure)
        losses.append(float(loss.detach()))
    if session is not None:
        session.close()
    return losses


def seen(run_dir: Path) -> RunView:
    view = load_run(run_dir)
    assert (int(view.page(0)["probe_failures"]), int(view.page(0)["steps_done"])) == (0, STEPS)
    assert run_detectors(view) == []
    return view


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("micros", [1, 3])
def test_what_the_optimizer_gets_is_read_when_the_closure_has_made_it(tmp_path: Path, named: bool, micros: int):
    assert train(tmp_path, named=named, micros=micros) == train(None, named=named, micros=micros)
    view = seen(tmp_path)
    steps = view.rank_steps(0)
    assert np.isfinite(steps["local_norm"]).all()
    assert (steps["micro_batches"] == micros).all()
    assert (steps["backward_ns"] > 0).all()
    assert steps["optimizer_ns"].min() < 10**7, "the closure, which sleeps for so long, is no part of it"
    assert len(view.law(UPDATES, 0)) > 0
    ledger = view.law(LEDGER, 0)
    for step in (1, STEPS):
        for row in range(4):
            mine = ledger[(ledger["step"] == step) & (ledger["row"] == row)]
            added = mine["value"][mine["side"] == Side.LOCAL].sum(axis=0)
            (final,) = mine["value"][mine["side"] == Side.FINAL]
            assert np.allclose(added, final, rtol=1e-4, atol=1e-6 * float(mine["scale"].max()))


def test_a_closure_that_is_called_several_times_begins_the_step_once(tmp_path: Path):
    assert train(tmp_path, lbfgs=True) == train(None, lbfgs=True)
    view = seen(tmp_path)
    assert view.rank(0).phase == ""
    assert np.isfinite(view.rank_steps(0)["learning_rate"]).all()


def test_a_closure_that_raises_ends_its_step(tmp_path: Path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def closure(bad: bool) -> torch.Tensor:
        loss = model(torch.ones(4, 3)).square().mean()
        loss.backward()
        if bad:
            raise ValueError("a bad sample")
        return loss

    with dtobs.attach(model, optimizer, run_dir=tmp_path, monitor=False):
        for step in range(6):
            optimizer.zero_grad()
            try:
                optimizer.step(lambda bad=step == 2: closure(bad))
            except ValueError:
                continue
    view = load_run(tmp_path)
    assert (int(view.page(0)["probe_failures"]), int(view.page(0)["steps_done"])) == (0, 5)
    assert view.rank(0).phase == ""


def test_a_closure_that_nobody_calls_leaves_a_step_that_counts(tmp_path: Path):
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()

    model = nn.Linear(3, 2)
    optimizer = Own(model.parameters(), 0.1)
    with dtobs.attach(model, optimizer, run_dir=tmp_path, monitor=False):
        for _ in range(4):
            model(torch.ones(4, 3)).square().mean().backward()
            optimizer.step(lambda: 0.0)
    view = load_run(tmp_path)
    assert (int(view.page(0)["probe_failures"]), int(view.page(0)["steps_done"])) == (0, 4)
