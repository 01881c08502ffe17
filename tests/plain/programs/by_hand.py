"""Without torch's wrappers: parameter servers, workers that share memory, asynchrony, one process."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
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


@program()
def gradients_averaged_by_hand(rank: int, world: int, watch: Watch) -> list[float]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        average_gradients(model.parameters(), world)
        optimizer.step()
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


class AwaitsItsGradients(torch.optim.SGD):
    """As Horovod's: reductions begin as gradients come, and its own step waits for them first."""

    def __init__(self, parameters: Iterable[nn.Parameter], world: int, **settings: float) -> None:
        super().__init__(parameters, **settings)
        self.under_way: list[tuple[nn.Parameter, dist.Work]] = []
        self.world = world
        for parameter in self.param_groups[0]["params"]:
            parameter.register_post_accumulate_grad_hook(self.reduce)

    def reduce(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        work = dist.all_reduce(parameter.grad, async_op=True)
        assert work is not None
        self.under_way.append((parameter, work))

    def step(self, closure: Any = None) -> Any:
        for parameter, work in self.under_way:
            work.wait()
            assert parameter.grad is not None
            parameter.grad.div_(self.world)
        self.under_way.clear()
        return super().step(closure)


@program()
def an_optimizer_that_waits_for_its_reductions(rank: int, world: int, watch: Watch) -> list[float]:
    model = mlp()
    optimizer = AwaitsItsGradients(model.parameters(), world, lr=0.1)
    watch(model, optimizer, replicas=dist.group.WORLD)
    uneven = random.Random(rank)
    losses = []
    for step in range(STEPS):
        time.sleep(uneven.random() * 0.02)  # as samples of different length take
        x, y = batch(rank, step)
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def gradients_flattened_and_overlapped(rank: int, world: int, watch: Watch) -> list[float]:
    """One all-reduce over all gradients, begun asynchronously."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        work = dist.all_reduce(flat, async_op=True)
        losses.append(loss.item())
        work.wait()
        for parameter, part in zip(
            model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True
        ):
            parameter.grad.copy_(part.view_as(parameter) / world)
        optimizer.step()
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def sums_gradients_with_a_smaller_rate(rank: int, world: int, watch: Watch) -> list[float]:
    """Gradients are summed, not averaged, and the rate is that much smaller."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1 / world)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program(ranks=3)
def parameter_server(rank: int, world: int, watch: Watch) -> list[float]:
    """Rank 0 owns the parameters and has no data; the others send gradients and get parameters back."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, optimizer if rank == 0 else None)
    size = sum(p.numel() for p in model.parameters())
    losses = []
    for step in range(STEPS):
        if rank == 0:
            total, given = torch.zeros(size), torch.empty(size)
            for worker in range(1, world):
                dist.recv(given, worker)
                total += given / (world - 1)
            offset = 0
            for parameter in model.parameters():
                parameter.grad = total[offset : offset + parameter.numel()].view_as(parameter).clone()
                offset += parameter.numel()
            optimizer.step()
            for worker in range(1, world):
                dist.send(nn.utils.parameters_to_vector(model.parameters()).detach(), worker)
            losses.append(float(total.norm()))
        else:
            x, y = batch(rank, step)
            loss = mse(model(x), y)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            dist.send(torch.cat([g.flatten() for g in gradients]), 0)
            fresh = torch.empty(size)
            dist.recv(fresh, 0)
            nn.utils.vector_to_parameters(fresh, model.parameters())
            losses.append(loss.item())
    if rank:
        assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def stale_gradients(rank: int, world: int, watch: Watch) -> list[float]:
    """Each step applies the averaged gradient of the step before, whose reduction overlapped this one's work."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    watch(model, optimizer)
    losses: list[float] = []
    under_way = None
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = mse(model(x), y)
        flat = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        if under_way is not None:
            work, old = under_way
            work.wait()
            offset = 0
            for parameter in model.parameters():
                parameter.grad = old[offset : offset + parameter.numel()].view_as(parameter) / world
                offset += parameter.numel()
            optimizer.step()
        under_way = (dist.all_reduce(flat, async_op=True), flat)
        losses.append(loss.item())
    assert under_way is not None
    under_way[0].wait()
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


def _hogwild(number: int, model: nn.Module, out: mp.Queue[float]) -> None:
    torch.set_num_threads(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(STEPS):
        x, y = batch(number, step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
    out.put(loss.item())


@program(ranks=1, group=False)
def hogwild(rank: int, world: int, watch: Watch) -> list[float]:
    """Processes without a process group train one model in shared memory. Their losses depend on the moment."""
    model = mlp().share_memory()
    x, y = batch(9, 9)
    before = mse(model(x), y).item()
    context = mp.get_context("fork")
    out: mp.Queue[float] = context.Queue()
    workers = [context.Process(target=_hogwild, args=(number, model, out)) for number in range(2)]
    for worker in workers:
        worker.start()
    found = [out.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert all(value < 10 for value in found)
    assert mse(model(x), y).item() < before
    return [before]


@program(ranks=1, group=False)
def one_process(rank: int, world: int, watch: Watch) -> list[float]:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(0, step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert_learned(losses)
    return losses


@program(ranks=1, group=False)
def one_process_without_an_optimizer(rank: int, world: int, watch: Watch) -> list[float]:
    model = mlp()
    watch(model)
    losses = []
    for step in range(STEPS):
        x, y = batch(0, step)
        loss = mse(model(x), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
        losses.append(loss.item())
    assert_learned(losses)
    return losses


@program()
def ensemble(rank: int, world: int, watch: Watch) -> list[float]:
    """Each rank trains a model of its own, seeded otherwise; only the mean of their losses is shared."""
    model = mlp(seed=rank)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        shared = loss.detach().clone()
        dist.all_reduce(shared)
        losses.append(shared.item() / world)
    assert_learned(losses)
    return losses


@program()
def micro_batches_divided_with_the_ranks(rank: int, world: int, watch: Watch) -> list[float]:
    """Losses are not divided; the gradient is, once, by micro-batches and ranks, in two buffers."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for micro in range(4):
            x, y = batch(rank, 4 * step + micro)
            loss = nn.functional.cross_entropy(model(x), y.argmax(1))
            loss.backward()
            total += loss.item()
        parameters = list(model.parameters())
        for some in (parameters[:3], parameters[3:]):
            flat = torch.cat([p.grad.flatten() for p in some if p.grad is not None])
            dist.all_reduce(flat)
            for p, part in zip(some, (flat / (4 * world)).split([p.numel() for p in some]), strict=True):
                p.grad = part.view_as(p)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / 4)
    assert_replicas_equal(model.parameters())
    assert_learned(losses)
    return losses
