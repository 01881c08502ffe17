"""The loops that a program trains in, as its recording has them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import dtobs
from dtobs.recording.view import load_run

Train = Callable[[nn.Module, torch.optim.Optimizer], None]


def one_loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


def epochs_of_batches_of_parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        for _ in range(2):
            for _ in range(2):
                model(torch.ones(1, 2)).sum().backward()
            for each in (optimizer,):
                each.step()


def in_functions(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    while True:
        backward_of(model)
        step_of([optimizer])
        if model.weight.isfinite().all():
            break


def backward_of(model: nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward()


def step_of(optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()


def no_loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    backward_of(model)
    optimizer.step()


def later_elsewhere(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(5):
        no_loop(model, optimizer)
    while optimizer is not None:
        no_loop(model, optimizer)
        no_loop(model, optimizer)
        no_loop(model, optimizer)
        optimizer = None


@pytest.mark.parametrize(
    ("train", "loops"),
    [
        (one_loop, [(1, 3, True)]),
        (epochs_of_batches_of_parts, [(2, 6, True), (1, 6, False)]),
        (in_functions, [(1, 4, True)]),
        (no_loop, []),
        (later_elsewhere, [(1, 2, True), (3, 7, True)]),
    ],
)
def test_loops_around_a_backward_and_a_step(tmp_path: Path, train: Train, loops: list[tuple[int, int, bool]]):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with dtobs.attach(model, optimizer, run_dir=tmp_path, monitor=False):
        train(model, optimizer)
    first = inspect.getsourcelines(train)[1]
    found = [loop for loop in load_run(tmp_path).meta(0).loops if loop.file == __file__]
    assert [(loop.first - first, loop.last - first, loop.inner) for loop in found] == loops
