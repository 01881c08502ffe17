"""What the ranks of the tests of silent errors and lost time run; here, because ranks import the module by name."""

from __future__ import annotations

from dtobs.drills import lost_time
from dtobs.drills.silent import SilentJob, train
from dtobs.probes import gradients


def run_silent(rank: int, world_size: int, job: SilentJob) -> None:
    """Train with a silent error, or without."""
    train(job)


def run_silent_sampled(rank: int, world_size: int, job: SilentJob) -> None:
    """As if the model were large: whole gradients in few steps only, a sample in the others."""
    gradients.WHOLE_BYTES_A_STEP = 1
    gradients.SAMPLE_FIRST, gradients.SAMPLE_TENSORS = 1, 2
    train(job)


def run_losing_time(rank: int, world_size: int, job: lost_time.TimeJob) -> None:
    """Train, and lose time."""
    lost_time.train(job)
