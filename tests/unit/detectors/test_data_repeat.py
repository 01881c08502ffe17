"""data-repeat fires on a sampler that keeps its epoch, and on nothing else; passes come from a real loader."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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


def test_ranks_that_are_asked_alone_are_named(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, 3).steps(4)
    for rank in run.ranks:
        for number in range(2):
            epoch = 0 if rank.number else number
            rank.meta("pass", step=number, sampler=0, shuffles=True, seed=0, epoch=epoch, replicas=3, samples=8)
    (finding,) = data_repeat(run.view())
    assert finding.ranks == (1, 2)
