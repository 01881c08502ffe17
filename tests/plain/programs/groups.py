"""Process groups: several of them, object collectives, functional collectives, barriers, validation on one rank."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.plain.kit import STEPS, Watch, assert_learned, assert_replicas_equal, batch, mlp, mse, program


def step_of(model: Any, optimizer: Any, rank: int, step: int) -> float:
    x, y = batch(rank, step)
    optimizer.zero_grad()
    loss = mse(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


@program(ranks=4)
def groups_of_two(rank: int, world: int, watch: Watch) -> list[float]:
    """Two pairs, each trains a model of its own by DDP over its pair."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = DDP(mlp(seed=rank // 2), process_group=pairs[rank // 2])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = [step_of(model, optimizer, rank, step) for step in range(STEPS)]
    assert_learned(losses)
    every = [torch.empty(6, 24) for _ in range(world)]
    dist.all_gather(every, list(model.parameters())[4].detach())
    assert torch.equal(every[0], every[1])
    assert torch.equal(every[2], every[3])
    assert not torch.equal(every[0], every[2])
    return losses


@program()
def metrics_in_a_group_of_their_own(rank: int, world: int, watch: Watch) -> list[float]:
    model, group = DDP(mlp()), dist.new_group(backend="gloo")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        shared = torch.tensor(step_of(model, optimizer, rank, step))
        dist.all_reduce(shared, group=group)
        losses.append(shared.item() / world)
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def objects(rank: int, world: int, watch: Watch) -> list[float]:
    """Settings are broadcast and statistics gathered as Python objects."""
    settings: list[Any] = [{"rate": 1e-2} if rank == 0 else None]
    dist.broadcast_object_list(settings)
    model = DDP(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), settings[0]["rate"])
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        losses.append(step_of(model, optimizer, rank, step))
        every: list[Any] = [None] * world
        dist.all_gather_object(every, {"rank": rank, "text": "x" * (10 * rank + step)})
        assert [one["rank"] for one in every] == list(range(world))
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def functional_collectives(rank: int, world: int, watch: Watch) -> list[float]:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = functional.all_reduce(parameter.grad, "sum", dist.group.WORLD) / world
        optimizer.step()
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def validates_on_rank_0(rank: int, world: int, watch: Watch) -> list[float]:
    """The others wait at a barrier meanwhile."""
    model = DDP(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        losses.append(step_of(model, optimizer, rank, step))
        if step % 8 == 7:
            if rank == 0:
                model.eval()
                with torch.no_grad():
                    for part in range(50):
                        x, y = batch(7, part)
                        mse(model.module(x), y)
                model.train()
            dist.barrier()
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def monitored_barriers(rank: int, world: int, watch: Watch) -> list[float]:
    model = DDP(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        losses.append(step_of(model, optimizer, rank, step))
        if step % 6 == 5:
            dist.monitored_barrier(timeout=timedelta(seconds=60))
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def stops_early_by_vote(rank: int, world: int, watch: Watch) -> list[float]:
    """Rank 0 decides, and tells the others by a broadcast."""
    model = DDP(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = []
    for step in range(200):
        losses.append(step_of(model, optimizer, rank, step))
        over = torch.tensor(int(rank == 0 and step >= STEPS))
        dist.broadcast(over, 0)
        if over:
            break
    assert len(losses) == STEPS + 1
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def group_is_made_anew(rank: int, world: int, watch: Watch) -> list[float]:
    """A group for each phase of the training, destroyed after it."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = []
    for phase in range(3):
        group = dist.new_group()
        for step in range(8):
            x, y = batch(rank, 8 * phase + step)
            optimizer.zero_grad()
            loss = mse(model(x), y)
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= world
            optimizer.step()
            losses.append(loss.item())
        dist.barrier()
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses
