"""Programs whose overlap of communication and computation is known by how they are built: what dtobs says of it live.

Each program notes by itself, on the clock of the machine, when it communicated and when it computed (both asleep). A
busy machine makes the sleeps longer than asked, but what was noted is what happened: the recording must agree with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import dtobs
from dtobs.recording.view import load_run
from tests.harness import run_ranks

STEPS, SKIPPED = 14, 2
WITHIN = 0.02
Interval = tuple[int, int]


class Notes:
    """What a rank noted in each step: intervals of computation and of communication in flight."""

    def __init__(self) -> None:
        self.steps: list[tuple[list[Interval], list[Interval]]] = []

    def next_step(self) -> None:
        self.steps.append(([], []))

    def computed(self, begin: int) -> None:
        """The host was busy from `begin` on until now; what it does to issue a call counts as that."""
        self.steps[-1][0].append((begin, time.monotonic_ns()))

    def communicated(self, begin: int) -> None:
        self.steps[-1][1].append((begin, time.monotonic_ns()))


def length(intervals: list[Interval]) -> int:
    """Of their union."""
    total, reached = 0, 0
    for begin, end in sorted(intervals):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def common(some: list[Interval], others: list[Interval]) -> list[Interval]:
    return [(max(a, c), min(b, d)) for a, b in some for c, d in others if min(b, d) > max(a, c)]


def train(folder: Path, model: nn.Module, step: Callable[[], object], notes: Notes) -> Notes:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with dtobs.attach(model, optimizer, run_dir=folder, monitor=False):
        for _ in range(STEPS):
            notes.next_step()
            step()
            optimizer.step()
            optimizer.zero_grad()
    return notes


def reduced_by_hand(rank: int, world: int, folder: Path, transfer: float, computation: float) -> Any:
    """An asynchronous all-reduce that takes `transfer`, because rank 1 joins that much later, under a computation."""
    notes, model, values = Notes(), nn.Linear(4, 4), torch.ones(4)

    def step() -> None:
        model(torch.ones(4)).sum().backward()
        if rank:
            time.sleep(transfer)
            dist.all_reduce(values)
            return
        begin = time.monotonic_ns()
        work = dist.all_reduce(values, async_op=True)
        time.sleep(computation)
        notes.computed(begin)
        work.wait()
        # What was over before the computation was ended there: where exactly makes no difference to what is exposed.
        notes.communicated(begin)

    return train(folder, model, step, notes).steps


class Slow(torch.autograd.Function):
    """A layer whose backward computes for as long as it is told."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class Model(nn.Module):
    """Two layers; the gradient of the last is on its way while what lies between them computes."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.first, self.last = seconds, nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(Slow.apply(self.first(x), self.seconds))


def reduced_by_ddp(rank: int, world: int, folder: Path, transfer: float, computation: float) -> Any:
    """DDP with two buckets, each of which takes `transfer`; the first one beside the computation."""
    notes = Notes()
    model = nn.parallel.DistributedDataParallel(Model(computation), bucket_cap_mb=0.01)
    backward_began = 0

    links = ThreadPoolExecutor(2)  # a callback of a future that is done already would sleep in the calling thread

    def slowly(_state: None, bucket: Any) -> Any:
        begin = time.monotonic_ns()
        reduced: Any = torch.futures.Future()

        def transfer_it(done: Any) -> None:
            time.sleep(transfer)
            notes.communicated(begin)
            reduced.set_result(done.value()[0].div_(world))

        dist.all_reduce(bucket.buffer(), async_op=True).get_future().add_done_callback(
            lambda done: links.submit(transfer_it, done)
        )
        if bucket.is_last():
            notes.computed(backward_began)  # the last gradient was ready: nothing is left to compute
        return reduced

    slowly.__annotations__ = {}  # DDP reads them, and takes none that are text
    model.register_comm_hook(None, slowly)

    def step() -> None:
        nonlocal backward_began
        loss = model(torch.ones(8, 64)).sum()
        backward_began = time.monotonic_ns()
        loss.backward()

    return train(folder, model, step, notes).steps


@pytest.mark.parametrize(
    ("program", "transfer", "computation", "built"),
    [
        pytest.param(reduced_by_hand, 0.25, 0.10, 0.15, id="by hand, half hidden"),
        pytest.param(reduced_by_hand, 0.05, 0.20, 0.0, id="by hand, all hidden"),
        pytest.param(reduced_by_ddp, 0.20, 0.12, 0.20, id="ddp, half hidden"),
        pytest.param(reduced_by_ddp, 0.10, 0.0, 0.10, id="ddp, nothing hidden"),
    ],
)
def test_what_is_exposed_is_what_nothing_hid(
    tmp_path: Path, program, transfer: float, computation: float, built: float
):
    notes = run_ranks(program, 2, tmp_path, transfer, computation)[0].value[SKIPPED:]
    steps = load_run(tmp_path).rank_steps(0)[SKIPPED:]
    assert len(steps) == len(notes) == STEPS - SKIPPED
    communication = np.array([length(moved) for _, moved in notes])
    hidden = np.array([length(common(moved, computed)) for computed, moved in notes])
    exposed, measured = communication - hidden, steps["exposed_ns"]
    # Where all is hidden, what is left is compared with what could have been exposed.
    reference = exposed if computation < transfer else communication
    # The median step: on a busy machine a thread may wait for its core between two of these notes.
    assert np.median(np.abs(measured - exposed) / reference) < WITHIN
    assert np.median((1 - measured / communication) - hidden / communication) == pytest.approx(0, abs=WITHIN)
    assert np.median(exposed) / 1e9 == pytest.approx(built, rel=0.2, abs=0.02), "the program is not what it says it is"
    if program is reduced_by_ddp:
        assert (steps["exposed_data_ns"] == measured).all()
