"""What the ranks of fault tests run; here, because ranks import the module by name."""

from __future__ import annotations

from dtobs.drills.job import Job, train


def run_job(rank: int, world_size: int, job: Job) -> int:
    """Train with a fault; the number of steps this rank did."""
    return train(job)
