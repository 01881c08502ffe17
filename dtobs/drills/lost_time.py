"""A small real job that loses time in the ways of `LOSSES`; "none" is the healthy twin of them all.

It sleeps for as long as computing and sending would take, so that the load of the machine hardly plays a part.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dtobs
from dtobs.drills.faults import EXTRA_BYTES, LOSSES, ODD, Loss

_WIDTH = 32
_SHARDED_WIDTH = 400
"""Of a layer that is sharded: its 640 kB take 0.13 s on a throttled link."""


@dataclass(frozen=True)
class TimeJob:
    """What to train and how to lose time; picklable."""

    run_dir: Path
    loss: str = "none"
    wrapper: str = "ddp"
    monitor: bool = False


class _Layer(nn.Module):
    """A layer that takes as long as it is told to: asleep, or on a core."""

    def __init__(self, on_core: bool = False, width: int = _WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.on_core = on_core

    def forward(self, inputs: torch.Tensor, seconds: float) -> torch.Tensor:
        if self.on_core:
            until = time.thread_time() + seconds
            while time.thread_time() < until:
                pass
        else:
            time.sleep(seconds)
        result: torch.Tensor = self.linear(inputs)
        return result


def train(job: TimeJob) -> None:
    """Train in the process group that exists, observed by dtobs."""
    lost = LOSSES[job.loss]
    torch.manual_seed(7)
    numbers = torch.Generator().manual_seed(100 + dist.get_rank())
    if job.wrapper == "pp":
        _train_pipeline(job, lost, numbers)
    elif job.wrapper == "hsdp":
        _train_shards(job, lost, numbers)
    else:
        _train_replicas(job, lost, numbers)


def _train_replicas(job: TimeJob, lost: Loss, numbers: torch.Generator) -> None:
    model = nn.parallel.DistributedDataParallel(_Layer(lost.on_core))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if lost.transfer:
        # DDP reads the annotations of a hook, and takes none that are text: a lambda has none.
        model.register_comm_hook(lost.transfer, lambda seconds, bucket: _reduce_slowly(seconds, bucket))
    extra = bytearray(EXTRA_BYTES) if lost.name == "memory-imbalance" and dist.get_rank() == ODD else bytearray()
    page = os.sysconf("SC_PAGE_SIZE")
    extra[::page] = b"x" * len(extra[::page])  # memory that was never written to is none
    heap = [[number] for number in range(400_000)] if lost.name == "garbage" else []
    kept: list[bytes] = []
    with dtobs.attach(model, optimizer, run_dir=job.run_dir, monitor=job.monitor) as session:
        for step in range(lost.steps):
            for micro in range(lost.micro_batches):
                rows, seconds = _work(lost, step, numbers)
                last = micro == lost.micro_batches - 1
                model.require_backward_grad_sync = last or lost.name == "no-sync-forgotten"
                inputs = torch.randn(rows, _WIDTH, generator=numbers)
                predicted = model(inputs, seconds)
                if heap:
                    gc.collect()
                (predicted.square().mean() / lost.micro_batches).backward()
            optimizer.step()
            optimizer.zero_grad()
            if lost.leak and (lost.code is None or dist.get_rank() == ODD):
                kept.append(b"x" * lost.leak)
            if lost.checkpoint and step % 8 == 7:
                with session.phase("checkpoint"):
                    time.sleep(lost.checkpoint)


def _train_shards(job: TimeJob, lost: Loss, numbers: torch.Generator) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    model = _Layer(width=_SHARDED_WIDTH)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with dtobs.attach(model, optimizer, run_dir=job.run_dir, monitor=job.monitor):
        for _ in range(lost.steps):
            inputs = torch.randn(8, _SHARDED_WIDTH, generator=numbers)
            model(inputs, lost.compute).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def _train_pipeline(job: TimeJob, lost: Loss, numbers: torch.Generator) -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, world = dist.get_rank(), dist.get_world_size()
    seconds = lost.compute * (lost.odd if rank == ODD else 1.0)
    model = _Stage(seconds)
    stage = PipelineStage(model, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, lost.micro_batches, loss_fn=lambda predicted, target: predicted.square().mean())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if lost.name == "slow-messages":
        _send_slowly(stage, lost.transfer)
    with dtobs.attach(model, optimizer, run_dir=job.run_dir, monitor=job.monitor) as session:
        session.watch_pipeline(schedule)
        for _ in range(lost.steps):
            batch = torch.randn(8 * lost.micro_batches, _WIDTH, generator=numbers)
            if rank == 0:
                schedule.step(batch)
            else:
                schedule.step(target=batch)
            optimizer.step()
            optimizer.zero_grad()


def _send_slowly(stage: Any, seconds: float) -> None:
    """From now on what the stage hands on and back takes `seconds` more to be sent."""

    def slowed(made: Callable[[int], list[Any]]) -> Callable[[int], list[Any]]:
        def send_slowly(micro_batch: int) -> list[Any]:
            operations = made(micro_batch)
            time.sleep(seconds if operations else 0.0)
            return operations

        return send_slowly

    stage.get_fwd_send_ops, stage.get_bwd_send_ops = slowed(stage.get_fwd_send_ops), slowed(stage.get_bwd_send_ops)


class _Stage(_Layer):
    """One stage of a pipeline, which takes as long for every micro-batch."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(inputs, self.seconds)


def _work(lost: Loss, step: int, numbers: torch.Generator) -> tuple[int, float]:
    """Rows of the next micro-batch, and how long they take."""
    if lost.name == "long-sequences":
        rows = int(torch.randint(4, 64, (), generator=numbers))
        return rows, lost.compute * rows / 32
    if lost.name == "slower-later" and 2 * step >= lost.steps:
        return 8, 2 * lost.compute
    return 8, lost.compute


def _reduce_slowly(seconds: float, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Average as DDP does, over a link that takes `seconds` for it."""
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)

    def later(done: torch.futures.Future[Any]) -> torch.Tensor:
        time.sleep(seconds)
        reduced: torch.Tensor = done.value()[0]
        return reduced.div_(dist.get_world_size())

    return work.get_future().then(later)  # type: ignore[no-any-return]
