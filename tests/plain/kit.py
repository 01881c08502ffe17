"""What the plain programs share: how they are listed, small models, and the proofs of their own health.

A program is a function of its rank, the world's size and `watch`, which it calls at the place where a user would attach
an observer; it trains for some steps and returns its losses. It asserts by itself that it is healthy.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch itself scripts them when it is imported
    import torch.distributed.optim

STEPS = 24


class Watch(Protocol):
    """`watch(model, optimizer)`: nothing without an observer."""

    def __call__(self, model: Any = None, optimizer: Any = None, **options: Any) -> None: ...


@dataclass(frozen=True)
class Program:
    """One program: how many ranks it needs, whether it wants a process group, what to say of it to an observer."""

    function: Callable[[int, int, Watch], list[float]]
    ranks: int = 2
    group: bool = True
    expect: str = ""  #: what a user declares because it is on purpose (`dtobs run --expect`)

    @property
    def name(self) -> str:
        return self.function.__name__


PROGRAMS: dict[str, Program] = {}


def program(ranks: int = 2, *, group: bool = True, expect: str = "") -> Callable[[Any], Any]:
    """List a function as a program."""

    def listed(function: Any) -> Any:
        assert function.__name__ not in PROGRAMS
        PROGRAMS[function.__name__] = Program(function, ranks, group, expect)
        return function

    return listed


def here() -> str:
    """The type of device on which a program makes its tensors."""
    return torch.get_default_device().type


def seeded(seed: int) -> torch.Generator:
    """A generator of the program's own, on its device."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def mlp(inputs: int = 12, hidden: int = 24, outputs: int = 6, seed: int = 0) -> nn.Sequential:
    """The same small network on every rank."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, outputs)
    )


def batch(rank: int, step: int, rows: int = 8, inputs: int = 12, outputs: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a task that can be learned, other ones on each rank and in each step."""
    made = seeded(1_000 * step + rank)
    x = torch.randn(rows, inputs, generator=made)
    return x, torch.tanh(x[:, :outputs] + 0.5 * x[:, -outputs:])


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean squared error."""
    return nn.functional.mse_loss(output, target)


def average_gradients(parameters: Iterable[nn.Parameter], world: int) -> None:
    """Data parallelism by hand."""
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world


def assert_replicas_equal(parameters: Iterable[torch.Tensor]) -> None:
    """Every rank holds the same bits."""
    flat = torch.cat([p.detach().flatten() for p in parameters])
    every = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(every, flat)
    assert all(torch.equal(flat, other) for other in every)


def assert_learned(losses: list[float]) -> None:
    """The loss is finite everywhere and smaller at the end than at the start."""
    assert all(-1e9 < loss < 1e9 for loss in losses), losses
    third = max(1, len(losses) // 3)
    assert sum(losses[-third:]) < sum(losses[:third]), losses


def train(model: Any, optimizer: Any, rank: int, steps: int = STEPS) -> list[float]:
    """The loop of a tutorial: losses that fall, and replicas that stay equal."""
    losses = []
    for step in range(steps):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses
