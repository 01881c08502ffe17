"""A small real training job to inject faults into: a few linear layers under any layout, observed by dtobs.

A fault is a function that one rank, the odd one, calls at one point of the job. Everything else is an ordinary loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import dtobs
from dtobs.drills import injectors, loop
from dtobs.drills.faults import FAULTS, Fault, Layout
from dtobs.drills.layouts import HIDDEN, WIDTH, Branched, spread
from dtobs.session.identity import Identity

Strike = Callable[[], None]
_BATCH = 4


@dataclass(frozen=True)
class Job:
    """What to train and what to break; picklable. `pause` seconds in every step make a slow job."""

    run_dir: Path
    fault: str = "none"
    wrapper: Layout = "ddp"
    odd: int = 1
    at_step: int = 6
    steps: int = 12
    hang_timeout: float | None = 2.0
    pause: float = 0.0
    timeout_seconds: float = 300.0  #: the process group's own
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
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(self._first + index))


def meet_and_train(job: Job, meet: Callable[[], None]) -> int:
    """Train in the process group that `meet` makes; returns the number of steps done. Raises what the fault raises."""
    fault = FAULTS[job.fault]
    if fault.point == "rendezvous":  # the session is there before the group is, to see who does not come
        dtobs.attach(run_dir=job.run_dir, hang_timeout=job.hang_timeout, monitor=job.monitor)
        if Identity.find().rank == job.odd:
            _marked(getattr(injectors, fault.strike), job.mark)()
    meet()
    return train(job)


def train(job: Job) -> int:
    """Train in the process group that exists; returns the number of steps done. Raises what the fault raises."""
    fault = FAULTS[job.fault]
    mine = dist.get_rank() == job.odd
    strike = _marked(getattr(injectors, fault.strike), job.mark)
    torch.manual_seed(7)
    plain = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))
    model = Branched(plain) if fault.point == "branch" else plain
    placed = spread(model, job.wrapper)
    optimizer = torch.optim.SGD(placed.model.parameters(), lr=0.01)
    with dtobs.attach(
        placed.model,
        optimizer,
        run_dir=job.run_dir,
        mesh=placed.mesh,
        replicas=placed.replicas,
        hang_timeout=job.hang_timeout,
        monitor=job.monitor,
    ) as session:
        if placed.schedule is not None:
            session.watch_pipeline(placed.schedule)
        if mine and fault.point == "start":
            strike()
        batches = _batches(job, strike if mine and fault.point == "loader" else None, placed.data_rank)

        def batch(step: int, _micro: int) -> tuple[torch.Tensor, torch.Tensor]:
            inputs, now = next(batches), step == job.at_step
            if mine and fault.point == "end" and now:
                _marked(injectors.leave_early, job.mark)()  # its data has ended
            if now:
                _strike(job, fault, session, mine, strike)
            if isinstance(model, Branched):
                model.use_aside = not (mine and now)
            time.sleep(job.pause or fault.pause)
            return inputs, inputs

        done = loop.train(placed, optimizer, job.steps, batch)
        if fault.point == "end":
            dist.barrier()
    return done


def _strike(job: Job, fault: Fault, session: Any, mine: bool, strike: Strike) -> None:
    """What happens in the step of the fault before its forward pass."""
    if mine and fault.point in ("forward", "branch"):
        strike()
    elif fault.point == "everywhere":
        _marked(partial(getattr(injectors, fault.strike_all), mine), job.mark if mine else None)()
    elif fault.point in ("checkpoint", "validation"):
        with session.phase(fault.point):
            if mine:
                strike()


def _marked(strike: Strike, mark: Path | None) -> Strike:
    def marked() -> None:
        if mark is not None:
            mark.touch()
        strike()

    return marked


def _batches(job: Job, strike: Strike | None, data_rank: int) -> Iterator[torch.Tensor]:
    count = job.steps * _BATCH
    samples = _Samples(count, strike, job.at_step * _BATCH, data_rank * count)
    return iter(DataLoader(samples, batch_size=_BATCH))
