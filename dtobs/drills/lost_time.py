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
from torch import Tensor, nn

import dtobs
from dtobs.drills import loop
from dtobs.drills.faults import EXTRA_BYTES, LOSSES, ODD, Loss
from dtobs.drills.layouts import Criterion, Spread, learner, loss, spread

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

    def __init__(self, lost: Loss, width: int = _WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.on_core, self.seconds = lost.on_core, 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        if self.on_core:
            until = time.thread_time() + self.seconds
            while time.thread_time() < until:
                pass
        else:
            time.sleep(self.seconds)
        result: Tensor = self.linear(inputs)
        return result


def train(job: TimeJob) -> None:
    """Train in the process group that exists, observed by dtobs."""
    lost = LOSSES[job.loss]
    torch.manual_seed(7)
    numbers = torch.Generator().manual_seed(100 + dist.get_rank())
    odd = dist.get_rank() == ODD
    placed, layer = {"pp": _pipeline, "hsdp": _shards}.get(job.wrapper, _replicas)(lost)
    optimizer = torch.optim.SGD(placed.model.parameters(), lr=0.01)
    width, rows_each = layer.linear.in_features, lost.micro_batches if placed.schedule is not None else 1
    extra = bytearray(EXTRA_BYTES if lost.name == "memory-imbalance" and odd else 0)
    page = os.sysconf("SC_PAGE_SIZE")
    extra[::page] = b"x" * len(extra[::page])  # memory that was never written to is none
    heap = [[number] for number in range(1_000_000)] if lost.name == "garbage" else []
    kept: list[bytes] = []

    def batch(step: int, _micro: int) -> tuple[Tensor, Tensor]:
        rows, layer.seconds = _work(lost, step, numbers)
        inputs = torch.randn(rows * rows_each, width, generator=numbers)
        return inputs, inputs

    def criterion(predicted: Tensor, wanted: Tensor) -> Tensor:
        if heap:
            gc.collect()
        return loss(predicted, wanted) / (1 if placed.schedule is not None else lost.micro_batches)

    def stepped(step: int) -> None:
        if lost.leak and (lost.code is None or odd):
            kept.append(b"x" * lost.leak)
        if lost.checkpoint and step % 8 == 7:
            with session.phase("checkpoint"):
                time.sleep(lost.checkpoint)

    attached = dtobs.attach(placed.model, optimizer, run_dir=job.run_dir, monitor=job.monitor)
    with attached as session:
        micros = 1 if placed.schedule is not None else lost.micro_batches
        if placed.schedule is not None:
            session.watch_pipeline(placed.schedule)
        each = lost.name == "no-sync-forgotten"
        loop.train(placed, optimizer, lost.steps, batch, criterion, micros=micros, reduce_each=each, stepped=stepped)


def _replicas(lost: Loss) -> tuple[Spread, _Layer]:
    layer = _Layer(lost)
    placed = spread(layer, "ddp")
    if lost.transfer:
        # DDP reads the annotations of a hook, and takes none that are text: a lambda has none.
        hook = lambda seconds, bucket: _reduce_slowly(seconds, bucket)  # noqa: E731
        placed.model.register_comm_hook(lost.transfer, hook)  # type: ignore[operator]
    return placed, layer


def _shards(lost: Loss) -> tuple[Spread, _Layer]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    layer = _Layer(lost, _SHARDED_WIDTH)
    fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    return Spread(layer, learner(layer), lambda: None, dist.get_rank(), mesh), layer


def _pipeline(lost: Loss) -> tuple[Spread, _Layer]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    layer = _Layer(lost)
    stage = PipelineStage(layer, rank, dist.get_world_size(), torch.device("cpu"))
    schedule = Schedule1F1B(stage, lost.micro_batches, loss_fn=lambda predicted, target: loss(predicted, target))
    if lost.name == "slow-messages":
        _send_slowly(stage, lost.transfer)

    def learn(inputs: Tensor, wanted: Tensor, _criterion: Criterion) -> None:
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=wanted)

    return Spread(layer, learn, lambda: None, rank, schedule=schedule), layer


def _send_slowly(stage: Any, seconds: float) -> None:
    """From now on what the stage hands on and back takes `seconds` more to be sent."""

    def slowed(made: Callable[[int], list[Any]]) -> Callable[[int], list[Any]]:
        def send_slowly(micro_batch: int) -> list[Any]:
            operations = made(micro_batch)
            time.sleep(seconds if operations else 0.0)
            return operations

        return send_slowly

    stage.get_fwd_send_ops, stage.get_bwd_send_ops = slowed(stage.get_fwd_send_ops), slowed(stage.get_bwd_send_ops)


def _work(lost: Loss, step: int, numbers: torch.Generator) -> tuple[int, float]:
    """Rows of the next micro-batch, and how long they take."""
    seconds = lost.compute * (lost.odd if dist.get_rank() == ODD else 1.0)
    if lost.name == "long-sequences":
        rows = int(torch.randint(4, 64, (), generator=numbers))
        return rows, seconds * rows / 32
    return 8, seconds * (2 if lost.name == "slower-later" and 2 * step >= lost.steps else 1)


def _reduce_slowly(seconds: float, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Average as DDP does, over a link that takes `seconds` for it."""
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)

    def later(done: torch.futures.Future[Any]) -> torch.Tensor:
        time.sleep(seconds)
        reduced: torch.Tensor = done.value()[0]
        return reduced.div_(dist.get_world_size())

    return work.get_future().then(later)  # type: ignore[no-any-return]
