"""What the ranks of the tests of silent errors and lost time run; here, because ranks import the module by name."""

from __future__ import annotations

import os
from pathlib import Path

from dtobs.drills import lost_time
from dtobs.drills.faults import ODD
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


def run_losing_time(rank: int, world_size: int, job: lost_time.TimeJob, group: Path | None = None) -> None:
    """Train, and lose time; `group` is the control group that the odd rank lives in."""
    if group is not None and rank == ODD:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    lost_time.train(job)
