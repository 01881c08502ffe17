"""Ranks that train a few steps observed by dtobs and know themselves what their gradients were."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import dtobs
from dtobs.drills.faults import Layout
from dtobs.drills.layouts import spread
from dtobs.drills.loop import synchronise
from dtobs.drills.silent import Samples

STEPS = 10


@dataclass(frozen=True)
class Truth:
    """What one rank computed: the norm of its own gradient a step, and of the mean over all ranks."""

    local: list[float]
    reduced: list[float]


def norm(tensors: list[torch.Tensor]) -> float:
    return float(torch.stack([t.double().square().sum() for t in tensors]).sum().sqrt())


def know_gradients(
    rank: int, world_size: int, run_dir: Path, wrapper: Layout, accumulate: int, sync_all: bool
) -> Truth:
    """Frozen parameters (learning rate 0), so that a plain copy of the model gives the truth of every step.

    `sync_all` reduces after every micro-batch instead of once a step.
    """
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    twin = copy.deepcopy(plain)
    placed = spread(plain, wrapper)
    model = placed.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    truth = Truth([], [])
    samples = Samples(rank)
    with dtobs.attach(model, optimizer, run_dir=run_dir, mesh=placed.mesh, monitor=False) as session:
        for _ in range(STEPS):
            twin.zero_grad()
            squares = 0.0
            for micro in range(accumulate):
                with session.phase("data"):
                    inputs, wanted = next(samples)
                if sync_all:
                    before = [p.grad.clone() if p.grad is not None else None for p in twin.parameters()]
                (twin(inputs) - wanted).square().mean().backward()
                if sync_all:
                    squares += (
                        norm(
                            [
                                p.grad - b if b is not None else p.grad
                                for p, b in zip(twin.parameters(), before, strict=True)
                            ]
                        )
                        ** 2
                    )
                synchronise(model, now=sync_all or micro == accumulate - 1)
                (model(inputs) - wanted).square().mean().backward()
            own = [p.grad.clone() for p in twin.parameters()]
            truth.local.append(squares**0.5 if sync_all else norm(own))
            for gradient in own:
                dist.all_reduce(gradient)
            truth.reduced.append(norm(own) / world_size)
            optimizer.step()
            optimizer.zero_grad()
    return truth


def train_a_temperature_outside(rank: int, world_size: int, run_dir: Path, averaged: bool) -> None:
    """DDP averages what is in the model; the temperature lies beside it, and is averaged by hand or not at all."""
    torch.manual_seed(0)
    model, temperature = nn.parallel.DistributedDataParallel(nn.Linear(8, 4)), nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.AdamW([*model.parameters(), temperature], 1e-2)
    made = torch.Generator().manual_seed(rank)
    with dtobs.attach(model, optimizer, run_dir=run_dir, monitor=False):
        for _ in range(40):
            x = torch.randn(16, 8, generator=made)
            optimizer.zero_grad()
            (temperature.exp() * model(x) - x[:, :4]).square().mean().backward()
            if averaged:
                dist.all_reduce(temperature.grad, dist.ReduceOp.SUM)
                temperature.grad /= world_size  # type: ignore[operator]
            optimizer.step()
