"""One training of a small classifier, on any number of ranks, that reads the same samples in each step however many
ranks share them; and the seven mistakes that make one rank and many disagree.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dtobs

STEPS, BATCH, CLASSES = 24, 16, 7


def _batch(step: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + step)
    labels = torch.randint(0, CLASSES, (BATCH,), generator=generator)
    means = torch.randn(CLASSES, 12, generator=torch.Generator().manual_seed(3))
    return means[labels] + 0.3 * torch.randn(BATCH, 12, generator=generator), labels


def _model(fault: str) -> nn.Module:
    torch.manual_seed(6 if fault == "seed" else 5)
    norm: nn.Module = nn.BatchNorm1d(32) if fault == "batch norm" else nn.LayerNorm(32)
    return nn.Sequential(nn.Linear(12, 32), norm, nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, CLASSES))


def train(run_dir: str, fault: str = "") -> float:
    """Train; returns the last loss. `fault` is one of ``FAULTS``."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1
    torch.set_num_threads(1)
    model = _model(fault)
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    rate = 0.05 * (world if fault == "learning rate" else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    cross_entropy = nn.CrossEntropyLoss(reduction="sum" if fault == "sum of losses" else "mean")
    loss = torch.zeros(())
    with dtobs.attach(model, optimizer, run_dir=Path(run_dir), probes={"ledger": "all", "samples": "all"}) as session:
        for step in range(STEPS):
            inputs, labels = _batch(step, 2 if fault == "data order" and step >= 8 else 1)
            if fault != "batch":  # a rank takes its part of the step's samples; by mistake each takes all
                inputs, labels = inputs[rank::world], labels[rank::world]
            session.batch(inputs=inputs, labels=labels)
            with torch.autocast("cpu", torch.bfloat16, enabled=fault == "precision"):
                loss = cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            if fault == "clipping":
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
    return loss.item()
