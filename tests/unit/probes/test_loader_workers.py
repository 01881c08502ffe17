"""What a batch takes the workers of a real loader, as the rank that trains has it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils import fetch

import dtobs
from dtobs.recording.view import load_run

pytestmark = pytest.mark.slow  # processes of its own

SECONDS = 0.004
AHEAD = 4  # batches that two workers may have ready when their count is first read


class Slow(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(SECONDS)
        return torch.full((4,), float(index))


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        for index in range(100):
            yield Slow()[index]


def said(folder: Path, loader: DataLoader[torch.Tensor], passes: int = 1) -> Any:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with dtobs.attach(model, optimizer, run_dir=folder, monitor=False):
        for _ in range(passes):
            for batch in loader:
                model(batch).sum().backward()
                optimizer.step()
    return load_run(folder).meta(0).process.get("loader_workers")


@pytest.mark.parametrize("data", [Slow, Stream])
@pytest.mark.parametrize("persistent", [False, True])
def test_forked_workers_say_what_a_batch_takes_them(tmp_path: Path, data: Any, persistent: bool):
    loader = DataLoader(data(), 4, num_workers=2, persistent_workers=persistent, multiprocessing_context="fork")
    told = said(tmp_path / "run", loader)
    assert told["workers"] == 2
    assert told["batches"] >= 16 - AHEAD
    assert told["seconds"] / told["batches"] >= 4 * SECONDS


def test_what_is_said_is_of_the_time_since_it_was_last_said(tmp_path: Path):
    loader = DataLoader(Slow(), 4, num_workers=2, multiprocessing_context="fork")
    assert said(tmp_path / "run", loader, passes=2)["batches"] < 80  # of 100, the last were said at the 64th


@pytest.mark.parametrize(("workers", "context"), [(0, None), (1, "spawn")])
def test_of_others_nothing_is_said(tmp_path: Path, workers: int, context: str | None):
    loader = DataLoader(Slow(), 10, num_workers=workers, multiprocessing_context=context)
    assert said(tmp_path / "run", loader) is None


def test_torch_is_as_it_was(tmp_path: Path):
    before = fetch._MapDatasetFetcher.fetch, fetch._IterableDatasetFetcher.fetch
    said(tmp_path / "run", DataLoader(Slow(), 50))
    assert before == (fetch._MapDatasetFetcher.fetch, fetch._IterableDatasetFetcher.fetch)
