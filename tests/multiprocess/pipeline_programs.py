"""Small pipelines whose computations sleep, so that two cores are enough to measure them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

import dtobs

WIDTH, MICRO_BATCHES = 4, 4
ONE_STAGE = ("ScheduleGPipe", "Schedule1F1B")
LOOPED = ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble")
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


class _Sleep(torch.autograd.Function):
    """Takes a while in forward, and as long in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Stage(nn.Module):
    """One linear layer that takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(self.linear(x), self.seconds)


def stage_numbers(schedule: str, rank: int, ranks: int) -> list[int]:
    """As in runtime.parallel.pipelines, by torch's class names."""
    if schedule in ONE_STAGE:
        return [rank]
    return [rank, 2 * ranks - 1 - rank] if schedule in V_SHAPED else [rank, rank + ranks]


def build(schedule: str, rank: int, ranks: int, seconds: float, micro_batches: int) -> tuple[Any, list[Stage]]:
    """The schedule and the parts of this rank."""
    numbers = stage_numbers(schedule, rank, ranks)
    count = ranks * len(numbers)
    parts = [Stage(seconds) for _ in numbers]
    stages = [PipelineStage(part, n, count, torch.device("cpu")) for part, n in zip(parts, numbers, strict=True)]
    kind = getattr(torch_schedules, schedule)
    given = stages[0] if schedule in ONE_STAGE else stages
    return kind(given, micro_batches, loss_fn=nn.functional.mse_loss), parts


def run_step(schedule: Any, numbers: list[int], count: int, micro_batches: int) -> None:
    """One pass of random numbers through the pipeline."""
    x = torch.randn(micro_batches, WIDTH)
    schedule.step(
        *((x,) if 0 in numbers else ()),
        **({"target": torch.zeros_like(x)} if count - 1 in numbers else {}),
        return_outputs=False,
    )


def hooked(stages: list[Any], schedule: Any) -> list[Any]:
    """What a watch replaces, as it is now."""
    names = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk", "get_fwd_send_ops")
    found = [vars(stage).get(name) for stage in stages for name in names]
    own = [vars(schedule).get(name) for name in ("step", "_loss_fn")]
    own += [kind.step for kind in (torch_schedules.PipelineScheduleSingle, torch_schedules.PipelineScheduleMulti)]
    return [*found, *own, torch_schedules._batch_p2p, torch_schedules._wait_batch_p2p]


def train(rank: int, world: int, folder: Path, schedule: str, seconds: float, steps: int) -> dict[str, Any]:
    """`steps` steps, watched; what the session left behind when it closed."""
    torch.manual_seed(0)
    made, parts = build(schedule, rank, world, seconds, MICRO_BATCHES)
    numbers = stage_numbers(schedule, rank, world)
    stages = made._stages if hasattr(made, "_stages") else [made._stage]
    before = hooked(stages, made)
    model = nn.ModuleList(parts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with dtobs.attach(model, optimizer, run_dir=folder, monitor=False) as session:
        for _ in range(2 * rank):  # rank 0 leaves it to be found when it steps; once is enough
            session.watch_pipeline(made)
        for _ in range(steps):
            run_step(made, numbers, world * len(numbers), MICRO_BATCHES)
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    return {"restored": before == hooked(stages, made)}


class _Made(torch.autograd.Function):
    """A loss whose gradient was computed together with it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, gradient: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.saved_tensors[0] * gradients[0], None, None


class ChunkedLoss:
    """Cross-entropy by halves of the micro-batch, each with a backward of its own: all logits never exist at once.

    The first call is torch's dry run, on memory that nobody has written.
    """

    def __init__(self, head: nn.Linear) -> None:
        self.head, self.calls = head, 0

    def __call__(self, hidden: Tensor, target: Tensor, *, tokens: int) -> Tensor:
        held = hidden.detach().requires_grad_()
        total = torch.zeros(())
        for half, labels in zip(held.chunk(2), target.chunk(2), strict=True):
            loss = nn.functional.cross_entropy(self.head(half), labels, reduction="sum") / tokens
            loss.backward()
            total += loss.detach()
        if self.calls == 0:
            self.head.zero_grad()  # before torch 2.14 the dry run leaves its gradients
        self.calls += 1
        assert held.grad is not None
        return _Made.apply(hidden, held.grad, total)


def train_by_chunks(rank: int, world: int, folder: Path, steps: int) -> None:
    """A pipeline of two stages whose loss has keyword arguments and backwards of its own."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # memory that nobody has written is full of NaN then
    part = Stage(0.0)
    part.head = nn.Linear(WIDTH, 3)
    stage = PipelineStage(part, rank, world, torch.device("cpu"))
    schedule = torch_schedules.Schedule1F1B(stage, MICRO_BATCHES, loss_fn=ChunkedLoss(part.head), scale_grads=False)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.01)
    rows = 2 * MICRO_BATCHES
    with dtobs.attach(part, optimizer, run_dir=folder, monitor=False):
        for _ in range(steps):
            last = {"target": torch.randint(3, (rows,)), "loss_kwargs": {"tokens": rows}}
            schedule.step(
                *((torch.randn(rows, WIDTH),) if rank == 0 else ()), **(last if rank else {}), return_outputs=False
            )
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
