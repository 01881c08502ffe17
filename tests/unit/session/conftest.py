"""A session for a test: recorded in its own folder, without a monitor, closed at the end whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dtobs
from dtobs.session import Session


@pytest.fixture
def attach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Session]]:
    """`dtobs.attach` into `tmp_path/run`."""
    for name in ("DTOBS_DISABLE", "DTOBS_PROBES", "DTOBS_RUN_DIR", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    opened: list[Session] = []

    def start(*arguments: Any, **options: Any) -> Session:
        session = dtobs.attach(*arguments, **{"run_dir": tmp_path / "run", "monitor": False, **options})
        opened.append(session)
        return session

    yield start
    for session in opened:
        session.close()


def make_model(seed: int = 0) -> nn.Sequential:
    """A model small enough for a unit test, the same every time."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, accumulate: int = 1) -> list[float]:
    """The losses of a plain loop."""
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for _ in range(accumulate):
            inputs = torch.randn(4, 8, generator=generator)
            loss = model(inputs).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
