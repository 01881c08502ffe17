"""What the ranks of fault tests run; here, because ranks import the module by name."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dtobs
from dtobs.drills.job import Job, meet_and_train, train


def run_job(rank: int, world_size: int, job: Job) -> int:
    """Train with a fault; the number of steps this rank did."""
    return train(job)


def run_job_and_suspend_rank_2(rank: int, world_size: int, job: Job) -> int:
    """The same; rank 2 suspends itself as soon as the fault has struck, before it can hear of it."""
    if rank == 2:
        threading.Thread(target=_suspend_after, args=(job.mark,), daemon=True).start()
    return train(job)


def _suspend_after(mark: Path) -> None:
    while not mark.exists():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGSTOP)


def meet_and_run_job(rank: int, world_size: int, job: Job) -> int:
    """The same for a fault that may strike before there is a process group; needs ``init_pg=False``."""

    def meet() -> None:
        store = f"file://{os.environ['DTOBS_TEST_STORE']}"
        dist.init_process_group("gloo", store, timedelta(minutes=5), world_size, rank)

    return meet_and_train(job, meet)


def paused_job(rank: int, world_size: int, run_dir: Path, go: Path) -> None:
    """Two steps, between which rank 1 stands still, on purpose and saying so, until `go` is there."""
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with dtobs.attach(model, optimizer, run_dir=run_dir, hang_timeout=2.0) as session:
        for step in range(2):
            if (rank, step) == (1, 1):
                with session.pause("debugging"):
                    while not go.exists():
                        time.sleep(0.05)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def still_job(rank: int, world_size: int, run_dir: Path, go: Path, behind: bool) -> None:
    """Steps, and a wait of every rank by itself until `go` is there: in the midst of them, or behind their loop."""
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with dtobs.attach(model, optimizer, run_dir=run_dir, hang_timeout=2.0):
        for step in range(12):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 7 and not behind:
                _wait_for(go)
        if behind:
            _wait_for(go)


def _wait_for(go: Path) -> None:
    while not go.exists():
        time.sleep(0.2)
