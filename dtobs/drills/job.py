"""A small real training job to inject faults into: a few linear layers under DDP or FSDP2, observed by dtobs.

A fault is a function that one rank, the odd one, calls at one point of one step. Everything else is an ordinary loop.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import dtobs
from dtobs.drills.hangs import FAULTS, StopTraining, Strike

Wrapper = Literal["ddp", "fsdp"]
_WIDTH = 32
_BATCH = 4


@dataclass(frozen=True)
class Job:
    """What to train and what to break; picklable. `pause` seconds in every step make a slow job."""

    run_dir: Path
    fault: str = "none"
    wrapper: Wrapper = "ddp"
    odd: int = 1
    at_step: int = 6
    steps: int = 12
    hang_timeout: float = 2.0
    pause: float = 0.0
    monitor: bool = True
    mark: Path | None = None  #: a file that the odd rank creates when it strikes


class _Samples(Dataset[torch.Tensor]):
    """Random samples; reading one may strike."""

    def __init__(self, count: int, strike: Strike | None, at: int, first: int) -> None:
        self._count, self._strike, self._at, self._first = count, strike, at, first

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._strike is not None and index == self._at:
            self._strike()
        return torch.randn(_WIDTH, generator=torch.Generator().manual_seed(self._first + index))


def train(job: Job) -> int:
    """Train in the process group that exists; returns the number of steps done. Raises what the fault raises."""
    fault = FAULTS[job.fault]
    strike = _marked(fault.strike, job.mark)
    mine = dist.get_rank() == job.odd
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(_WIDTH, 64), nn.ReLU(), nn.Linear(64, _WIDTH))
    wrapped = _wrap(model, job.wrapper)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    done = 0
    with dtobs.attach(
        wrapped, optimizer, run_dir=job.run_dir, hang_timeout=job.hang_timeout, monitor=job.monitor
    ) as session:
        in_loader = strike if mine and fault.point == "loader" else None
        for step, batch in enumerate(_batches(job, in_loader)):
            try:
                if step == job.at_step and mine and fault.point == "forward":
                    strike()
                if step == job.at_step and fault.point == "everywhere":
                    _marked(partial(fault.strike_all, mine), job.mark if mine else None)()
                if step == job.at_step and fault.point == "checkpoint":
                    with session.phase("checkpoint"):
                        if mine:
                            strike()
            except StopTraining:
                break
            if job.pause:
                time.sleep(job.pause)
            loss = wrapped(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
    return done


def _marked(strike: Strike, mark: Path | None) -> Strike:
    def marked() -> None:
        if mark is not None:
            mark.touch()
        strike()

    return marked


def _batches(job: Job, strike: Strike | None) -> Iterator[torch.Tensor]:
    count = job.steps * _BATCH
    samples = _Samples(count, strike, job.at_step * _BATCH, first=dist.get_rank() * count)
    return iter(DataLoader(samples, batch_size=_BATCH))


def _wrap(model: nn.Sequential, wrapper: Wrapper) -> nn.Module:
    if wrapper == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
