"""A loop that sets a default device: what dtobs makes for itself is made where dtobs needs it.

Seen on an H100 with `torch.set_default_device("cuda")`: nearly every probe failed. Here the default is a device that
holds no values, so that a tensor made there by mistake cannot be read.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dtobs
from dtobs.diagnose import diagnose, gather
from dtobs.recording.view import load_run
from tests.harness import run_ranks

STEPS = 16


def train(rank: int, world: int, folder: Path) -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(world * STEPS * 4, 6), torch.randn(world * STEPS * 4, 3))
    sampler = DistributedSampler(data, shuffle=False)
    model = DDP(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.LayerNorm(8), nn.Linear(8, 3)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    batches = list(DataLoader(data, batch_size=4, sampler=sampler))
    torch.set_default_device("meta")
    try:
        probes = {"conservation": "all", "updates": "all", "ledger": "all"}
        with dtobs.attach(model, optimizer, run_dir=folder, monitor=False, probes=probes):
            for inputs, targets in batches:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(inputs), targets).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            dist.all_reduce(torch.ones(4, device="cpu"))
    finally:
        torch.set_default_device(None)


def test_a_default_device_is_the_loops_and_not_ours(tmp_path: Path):
    run_ranks(train, 2, tmp_path / "run")
    view = load_run(tmp_path / "run")
    assert [view.page(rank)["probe_failures"] for rank in (0, 1)] == [0, 0]
    assert len(view.rank_steps(0)) == STEPS
    assert diagnose(gather(tmp_path / "run")).findings == ()
