"""Stages of one model on different ranks: torch's schedules and send/receive by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from tests.plain.kit import STEPS, Watch, assert_learned, assert_replicas_equal, batch, mlp, mse, program, seeded


def halves() -> list[nn.Sequential]:
    parts = list(mlp())
    return [nn.Sequential(*parts[:2]), nn.Sequential(*parts[2:])]


def reference(steps: int = STEPS) -> list[float]:
    """The same training in one process."""
    alone = mlp()
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    losses = []
    for step in range(steps):
        x, y = batch(0, step, rows=16)
        optimizer.zero_grad()
        loss = mse(alone(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def scheduled(rank: int, world: int, watch: Watch, schedule_class: Any) -> list[float]:
    module = halves()[rank]
    stage = PipelineStage(module, rank, world, torch.get_default_device())
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    schedule = schedule_class(stage, n_microbatches=4, loss_fn=mse)
    watch(module, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(0, step, rows=16)
        optimizer.zero_grad()
        parts: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=parts)
            losses.append(torch.stack(parts).mean().item())
        optimizer.step()
    if rank == world - 1:
        assert_learned(losses)
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(reference()), rtol=1e-3, atol=1e-4)
    return losses


@program()
def gpipe(rank: int, world: int, watch: Watch) -> list[float]:
    return scheduled(rank, world, watch, ScheduleGPipe)


@program()
def one_forward_one_backward(rank: int, world: int, watch: Watch) -> list[float]:
    return scheduled(rank, world, watch, Schedule1F1B)


@program()
def interleaved_stages(rank: int, world: int, watch: Watch) -> list[float]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4)]
    own = [layers[rank], layers[rank + world]]
    stages = [
        PipelineStage(part, rank + world * n, 2 * world, torch.get_default_device()) for n, part in enumerate(own)
    ]
    model = nn.ModuleList(own)
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    schedule = ScheduleInterleaved1F1B(stages, n_microbatches=4, loss_fn=mse)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, _ = batch(0, step, rows=16)
        optimizer.zero_grad()
        parts: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=torch.tanh(x), losses=parts)
            losses.append(torch.stack(parts).mean().item())
        optimizer.step()
    if losses:
        assert_learned(losses)
    return losses


@program()
def pipeline_by_hand(rank: int, world: int, watch: Watch) -> list[float]:
    """Activations are sent forth and gradients back, a micro-batch at a time."""
    module = halves()[rank]
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    watch(module, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(0, step, rows=16)
        optimizer.zero_grad()
        total = 0.0
        for part, wanted in zip(x.chunk(4), y.chunk(4), strict=True):
            if rank == 0:
                out = module(part)
                dist.send(out.detach(), 1)
                gradient = torch.empty_like(out)
                dist.recv(gradient, 1)
                out.backward(gradient)
            else:
                given = torch.empty(4, 24)
                dist.recv(given, 0)
                given.requires_grad_()
                loss = mse(module(given), wanted) / 4
                loss.backward()
                dist.send(given.grad, 0)
                total += loss.item()
        optimizer.step()
        if rank == 1:
            losses.append(total)
    if rank == 1:
        assert_learned(losses)
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(reference()), rtol=1e-3, atol=1e-4)
    return losses


@program()
def ends_of_a_pipeline_share_an_embedding(rank: int, world: int, watch: Watch) -> list[float]:
    """The first stage embeds, the last one reads out with a copy of the same matrix; they add up their gradients."""
    torch.manual_seed(0)
    shared = torch.randn(16, 8) * 0.3
    torch.manual_seed(1 + rank)
    stage = nn.ModuleDict({"body": nn.Linear(8, 8)})
    name = "embed" if rank == 0 else "head"
    stage[name] = nn.Linear(8, 16, bias=False)
    stage[name].weight = nn.Parameter(shared.clone())
    optimizer = torch.optim.AdamW(stage.parameters(), 1e-2)
    watch(stage, optimizer)
    losses = []
    for step in range(2 * STEPS):
        made = seeded(step)
        tokens = torch.randint(0, 16, (32,), generator=made)
        optimizer.zero_grad()
        matrix = stage[name].weight
        loss = torch.zeros(())
        if rank == 0:
            hidden = torch.tanh(stage["body"](matrix[tokens]))
            dist.send(hidden.detach(), 1)
            back = torch.empty_like(hidden)
            dist.recv(back, 1)
            hidden.backward(back)
        else:
            hidden = torch.empty(32, 8)
            dist.recv(hidden, 0)
            hidden.requires_grad_(True)
            loss = nn.functional.cross_entropy(stage["head"](torch.tanh(stage["body"](hidden))), (tokens + 1) % 16)
            loss.backward()
            dist.send(hidden.grad, 0)
        dist.all_reduce(matrix.grad)
        optimizer.step()
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        losses.append(loss.item())
    assert_replicas_equal([stage[name].weight])
    assert_learned(losses)
    return losses


@program()
def one_forward_one_backward_of_classes(rank: int, world: int, watch: Watch) -> list[float]:
    """The loss of a micro-batch is a mean, and the schedule divides their sum."""
    module = halves()[rank]
    stage = PipelineStage(module, rank, world, torch.get_default_device())
    optimizer = torch.optim.SGD(module.parameters(), 0.3)
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.cross_entropy)
    watch(module, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(0, step, rows=16)
        parts: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y.argmax(1), losses=parts)
            losses.append(torch.stack(parts).mean().item())
        optimizer.step()
        optimizer.zero_grad()
    if losses:
        assert_learned(losses)
    return losses
