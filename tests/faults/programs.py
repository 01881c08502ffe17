"""What the ranks of fault tests run; here, because ranks import the module by name."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from dtobs.drills.job import Job, meet_and_train, train


def run_job(rank: int, world_size: int, job: Job) -> int:
    """Train with a fault; the number of steps this rank did."""
    return train(job)


def meet_and_run_job(rank: int, world_size: int, job: Job) -> int:
    """The same for a fault that may strike before there is a process group; needs ``init_pg=False``."""

    def meet() -> None:
        store = f"file://{os.environ['DTOBS_TEST_STORE']}"
        dist.init_process_group("gloo", store, timedelta(minutes=5), world_size, rank)

    return meet_and_train(job, meet)
