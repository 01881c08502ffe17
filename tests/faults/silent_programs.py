"""What the ranks of the tests of silent errors and lost time run; here, because ranks import the module by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from dtobs.drills import lost_time
from dtobs.drills.capabilities import Confinement
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


def run_losing_time(
    rank: int, world_size: int, job: lost_time.TimeJob, confinements: Mapping[int, Confinement], store: Path
) -> None:
    """Train, and lose time, where `confinements` says that the rank lives; ranks meet through the file `store`."""
    confinements.get(rank, Confinement()).enter()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    lost_time.train(job)
