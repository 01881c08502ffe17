"""data-repeat fires on a sampler that keeps its epoch, and on nothing else; passes come from a real loader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset, get_worker_info

import dtobs
from dtobs.detectors.silent.data_repeat import data_repeat
from dtobs.recording.view import load_run
from dtobs.testing.fake_run import FakeRun


def train(run_dir: Path, *, set_epoch: bool, shuffle: bool = True, workers: int = 0) -> None:
    data = TensorDataset(torch.arange(32.0).reshape(16, 2))
    sampler = DistributedSampler(data, num_replicas=2, rank=0, shuffle=shuffle)
    held_out = DataLoader(data, 2, sampler=DistributedSampler(data, num_replicas=2, rank=0))
    loader = DataLoader(data, 2, sampler=sampler, num_workers=workers, persistent_workers=workers > 0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with dtobs.attach(model, optimizer, run_dir=run_dir, monitor=False):
        for epoch in range(3):
            if set_epoch:
                sampler.set_epoch(epoch)
            for (batch,) in loader:
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                for (batch,) in held_out:
                    model(batch)


def test_an_epoch_that_stays_is_found(tmp_path: Path) -> None:
    train(tmp_path, set_epoch=False)
    (finding,) = data_repeat(load_run(tmp_path))
    assert finding.summary == (
        "every rank reads its shuffled data in the same order in 3 passes: the sampler's epoch stays 0"
    )
    assert finding.step == 5  # the first of the second pass


@pytest.mark.parametrize(("set_epoch", "shuffle"), [(True, True), (False, False)])
def test_new_orders_and_no_shuffling_are_quiet(tmp_path: Path, set_epoch: bool, shuffle: bool) -> None:
    train(tmp_path, set_epoch=set_epoch, shuffle=shuffle)
    view = load_run(tmp_path)
    assert len(view.meta(0).passes) == 3
    assert data_repeat(view) == []


class Stream(IterableDataset[torch.Tensor]):
    """Twenty batches of two, of which each worker reads a part or, by mistake, all."""

    def __init__(self, parts: bool) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, each = (info.id, info.num_workers) if info is not None and self.parts else (0, 1)
        for number in range(first, 40, each):
            yield torch.arange(2.0) + number


@pytest.mark.parametrize(("workers", "parts", "repeats"), [(2, False, 2), (2, True, 0), (0, False, 0)])
def test_a_stream_that_every_worker_reads(tmp_path: Path, workers: int, parts: bool, repeats: int) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with dtobs.attach(model, optimizer, run_dir=tmp_path, monitor=False):
        for batch in DataLoader(Stream(parts), 2, num_workers=workers):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = data_repeat(load_run(tmp_path))
    assert [f.aspect for f in found] == (["workers"] if repeats else [])
    if repeats:
        assert f"rank 0 reads each batch {repeats} times in a row" in found[0].summary


def test_steps_that_take_a_batch_twice_on_purpose_are_quiet(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with dtobs.attach(model, optimizer, run_dir=tmp_path, monitor=False):
        for batch in DataLoader(Stream(parts=True), 2, num_workers=2):
            for _ in range(2):
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert data_repeat(load_run(tmp_path)) == []


def test_ranks_that_are_asked_alone_are_named(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, 3).steps(4)
    for rank in run.ranks:
        for number in range(2):
            epoch = 0 if rank.number else number
            rank.meta("pass", step=number, sampler=0, shuffles=True, seed=0, epoch=epoch, replicas=3, samples=8)
    (finding,) = data_repeat(run.view())
    assert finding.ranks == (1, 2)
