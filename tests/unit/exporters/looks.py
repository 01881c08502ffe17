"""A run whose every metric has a value, the same at each call."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from dtobs.events import FP8_ROLES, Kind, PipelineOp
from dtobs.exporters.look import MonitorSnapshot
from dtobs.exporters.totals import StepTotals
from dtobs.findings import Finding
from dtobs.host.process import ProcessState
from dtobs.recording.plan import Plan
from dtobs.testing.fake_run import FakeRank, FakeRun


@dataclass
class Cost:
    """Made-up numbers of a monitor."""

    cpu_seconds: float = 1.5
    rss_bytes: float = 4e7
    ticks: int = 60
    passes: int = 20
    pass_seconds: float = 0.02
    captures: int = 1
    errors: dict[str, int] = field(default_factory=lambda: {"journal": 2})


def full_run(root: Path, world: int = 2) -> FakeRun:
    """Twenty steps, a checkpoint, device memory, norms; rank 1 stopped reporting."""
    info = {"versions": {"torch": "2.13.0", "dtobs": "0.1.0"}, "config": {"run": {"peak_flops": 1e12}}}
    run = FakeRun(root, world, info=info)
    for step in range(20):
        for rank in run.ranks:
            late = 1_000_000 * rank.number
            sync = rank.clock_ns + 50_000_000 + late
            reduction(rank)
            pipeline = pipeline_step(rank, rank.clock_ns)
            rank.step(local_norm=2.0, reduced_norm=1.5, sync_ns=sync, sync_seq=step + 1, checkpoint=0.01, **pipeline)
    plan = Plan("ScheduleGPipe", 1, (0,), world, tuple(range(world)))
    run.rank(0).meta("unobserved", what="LBFGS of 2 parameters", step=9, why="its parameters are in no model")
    for rank in run.ranks:
        rank.meta("pipeline", **vars(plan))
        rank.page(
            tokens=20480,
            global_tokens=20480 * world,
            validation_loss=1.9,
            loss_scale=65536,
            gradient_zeros=0.25,
            **{f"fp8_amax_{role}": 2.5 for role in FP8_ROLES},
            **{f"fp8_saturated_{role}": 0.0 for role in FP8_ROLES},
            **{f"fp8_flushed_{role}": 0.125 for role in FP8_ROLES},
            model_flops=5e10,
            hardware_flops=6e10,
            collectives=20,
            collective_bytes=8e7,
            device_bytes=1e9,
            device_peak_bytes=2e9,
            device_total_bytes=8e9,
            checkpoint_seconds=0.2,
            checkpoint_bytes=1e8,
            probe_ns=2_000_000,
            events=300,
        )
    return run


def reduction(rank: FakeRank) -> None:
    """An all-reduce of 4 KiB that is over a millisecond after the last rank has come."""
    group = rank.run.group()
    rank.collective("all_reduce").advance(1e-3)
    rank.event(Kind.WAIT_END, group=group, seq=rank.seqs[group], value=1e-3).advance(-1e-3)


def pipeline_step(rank: FakeRank, begin: int) -> dict[str, int]:
    """One micro-batch of GPipe, two milliseconds a stage each way, a millisecond of idle time beyond the schedule's."""
    last, at = rank.run.world - 1, rank.number
    forward = begin + 2_000_000 * at
    backward = begin + 2_000_000 * (2 * last + 1 - at) + 1_000_000
    rank.pipeline(PipelineOp.FORWARD, forward, forward + 2_000_000)
    rank.pipeline(PipelineOp.BACKWARD, backward, backward + 2_000_000)
    return {
        "pipeline_begin_ns": forward,
        "pipeline_end_ns": backward + 2_000_000,
        "pipeline_compute_ns": 4_000_000,
    }


def full_look(root: Path, world: int = 2) -> MonitorSnapshot:
    """`full_run` a second after its last step, with a finding, as node 0's monitor sees it."""
    view = full_run(root, world).view(later=1.0, processes={1: ProcessState(7, alive=True, state="T")})
    view.pages["heartbeat_ns"] = view.now_ns - 1_000_000_000
    utc = (view.now_ns + int(view.pages["clock_offset_ns"][0])) / 1e9
    view.pages["checkpoint_utc"] = utc - 30
    totals = StepTotals()
    totals.update(view, view.ranks)
    found = [Finding("rank-stopped", "rank 1 is stopped", (1,))]
    return MonitorSnapshot(view, 0, True, found, totals, Cost(), 12.0)
