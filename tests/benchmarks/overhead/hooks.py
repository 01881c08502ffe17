"""Thread CPU microseconds of single hooks: the least of several rounds, because another process can only add to it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import dtobs

ROUNDS = 15
NUMBERS = (
    "gradients",
    "reduced gradients",
    "parameters",
    "generators",
    "inputs",
    "samples",
    "ledger",
    "loss weights",
    "updates",
)
"""The probes that look at numbers; the others are what these hang on."""


def microseconds(call: Callable[[], object], times: int = 1000) -> float:
    """Of one `call`."""

    def once() -> float:
        begin = time.thread_time_ns()
        for _ in range(times):
            call()
        return (time.thread_time_ns() - begin) / times / 1e3

    return min(once() for _ in range(ROUNDS))


def measure_hooks(rank: int, world_size: int) -> dict[str, float]:
    """Microseconds by name; a group of one rank, so that nothing waits."""
    small = torch.ones(4)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    inputs = torch.ones(1, 2)

    def reduce() -> None:
        dist.all_reduce(small)

    def step() -> None:
        model(inputs).backward()
        optimizer.step()

    found = {"all_reduce_plain": microseconds(reduce), "tiny_step_plain": microseconds(step, 200)}
    for level in ("full", "cheap", "off"):
        levels = {"collectives": level, **dict.fromkeys(NUMBERS, "off")}
        with dtobs.attach(model, optimizer, run_dir=Path(tempfile.mkdtemp()), monitor=False, probes=levels) as session:
            assert session.active
            found[f"all_reduce_{level}"] = microseconds(reduce) - found["all_reduce_plain"]
            if level != "full":
                continue
            found["step_without_the_number_probes"] = microseconds(step, 200) - found["tiny_step_plain"]

            def phase() -> None:
                with session.phase("data"):
                    pass

            found["named_phase"] = microseconds(phase)
            found["report"] = microseconds(lambda: session.report(loss=1.0, tokens=1))
    with dtobs.attach(model, optimizer, run_dir=Path(tempfile.mkdtemp()), monitor=False):
        found["step_with_all_probes_on_3_parameters"] = microseconds(step, 200) - found["tiny_step_plain"]
    return found
