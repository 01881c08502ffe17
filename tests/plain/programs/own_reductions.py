"""Gradients that a loop reduces by hand, and what it does to them on the way: clips, weighs, thins out, or stops."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from tests.plain.kit import (
    STEPS,
    Watch,
    assert_learned,
    assert_replicas_equal,
    average_gradients,
    batch,
    mlp,
    mse,
    program,
)

Reduce = Callable[[list[nn.Parameter], int], None]
"""(parameters, step): what happens to their gradients before the optimizer steps."""


def learns(
    rank: int, watch: Watch, reduce: Reduce, rows: Callable[[int], int] = lambda step: 8, rate: float = 0.1
) -> list[float]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), rate)
    watch(model, optimizer)
    losses = []
    for step in range(2 * STEPS):
        x, y = batch(rank, step, rows(step))
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        reduce(list(model.parameters()), step)
        optimizer.step()
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def clips_what_each_rank_computes(rank: int, world: int, watch: Watch) -> list[float]:
    """Before the average, so that no rank is louder than another."""

    def reduce(parameters: list[nn.Parameter], step: int) -> None:
        nn.utils.clip_grad_norm_(parameters, 0.2)
        average_gradients(parameters, world)

    return learns(rank, watch, reduce)


@program()
def weighs_ranks_by_their_samples(rank: int, world: int, watch: Watch) -> list[float]:
    """Ranks read batches of different size, and each sample counts the same."""

    def rows(step: int, of: int = rank) -> int:
        return 4 + 4 * ((of + step // 3) % world)

    def reduce(parameters: list[nn.Parameter], step: int) -> None:
        total = sum(rows(step, each) for each in range(world))
        for parameter in parameters:
            parameter.grad.mul_(rows(step) / total)
            dist.all_reduce(parameter.grad)

    return learns(rank, watch, reduce, rows)


@program()
def sends_the_largest_only(rank: int, world: int, watch: Watch) -> list[float]:
    """After some steps, the largest quarter; what is left behind is added in the next step."""
    left: dict[int, torch.Tensor] = {}

    def reduce(parameters: list[nn.Parameter], step: int) -> None:
        for number, parameter in enumerate(parameters if step >= 8 else ()):
            gradient = parameter.grad
            gradient += left.get(number, 0.0)
            least = gradient.abs().flatten().kthvalue(gradient.numel() * 3 // 4 + 1).values
            sent = torch.where(gradient.abs() >= least, gradient, 0.0)
            left[number] = gradient - sent
            gradient.copy_(sent)
        average_gradients(parameters, world)

    return learns(rank, watch, reduce)


@program()
def follows_the_majority_of_signs(rank: int, world: int, watch: Watch) -> list[float]:
    def reduce(parameters: list[nn.Parameter], step: int) -> None:
        for parameter in parameters:
            parameter.grad.sign_()
            dist.all_reduce(parameter.grad)
            parameter.grad.sign_()

    return learns(rank, watch, reduce, rate=0.005)


@program()
def reduces_layers_by_turns(rank: int, world: int, watch: Watch) -> list[float]:
    """After some steps, every other one trains only the last layer, and reduces only that."""

    def reduce(parameters: list[nn.Parameter], step: int) -> None:
        if step >= 8 and step % 2:
            for parameter in parameters[:-2]:
                parameter.grad = None
        average_gradients(parameters, world)

    return learns(rank, watch, reduce)


@program()
def averages_parameters_later_on(rank: int, world: int, watch: Watch) -> list[float]:
    """Synchronous to begin with, then every rank trains by itself and parameters are averaged every sixth step."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, optimizer)
    losses = []
    for step in range(10 + 30):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        if step < 10:
            average_gradients(model.parameters(), world)
        optimizer.step()
        if step >= 10 and step % 6 == 3:
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= world
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program(ranks=3)
def reduces_to_the_rank_that_trains_it(rank: int, world: int, watch: Watch) -> list[float]:
    """Each rank trains every third parameter, whose gradient is reduced to it alone, and sends what it made of it."""
    model = mlp()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters[rank::world], 1e-2)
    watch(model, optimizer)
    losses = []
    for step in range(2 * STEPS):
        x, y = batch(rank, step)
        loss = mse(model(x), y)
        loss.backward()
        for number, parameter in enumerate(parameters):
            dist.reduce(parameter.grad, number % world)
            if number % world == rank:
                parameter.grad /= world
            else:
                parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
        for number, parameter in enumerate(parameters):
            dist.broadcast(parameter.data, number % world)
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(parameters)
    return losses


@program()
def reduces_to_one_that_steps_for_all(rank: int, world: int, watch: Watch) -> list[float]:
    """The first rank steps for all; what the others make of their own gradients is written over by its weights."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, optimizer)
    losses = []
    for step in range(2 * STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        work = [dist.reduce(parameter.grad, 0, op=dist.ReduceOp.SUM, async_op=True) for parameter in model.parameters()]
        for each, parameter in zip(work, model.parameters(), strict=True):
            each.wait()
            parameter.grad /= world
        optimizer.step()
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses
