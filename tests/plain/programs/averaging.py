"""Replicas that differ for some steps on purpose, and meet again: local SGD and its relatives."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.plain.kit import STEPS, Watch, assert_learned, assert_replicas_equal, batch, mlp, mse, program, train


@torch.no_grad()
def average(parameters: list[torch.nn.Parameter], world: int) -> None:
    for parameter in parameters:
        dist.all_reduce(parameter.data)
        parameter.data /= world


@program()
def local_sgd(rank: int, world: int, watch: Watch) -> list[float]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        if step % 4 == 3:
            average(list(model.parameters()), world)
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def local_sgd_under_no_sync(rank: int, world: int, watch: Watch) -> list[float]:
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        with model.no_sync():
            loss = mse(model(x), y)
            loss.backward()
        optimizer.step()
        if step % 6 == 5:
            average(list(model.parameters()), world)
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def post_local_sgd(rank: int, world: int, watch: Watch) -> list[float]:
    """Synchronous to begin with, then averages every fourth step, as torch's own optimizer for it does."""
    model = DDP(mlp())
    own = dist.new_subgroups(group_size=1)[0]
    model.register_comm_hook(PostLocalSGDState(None, own, start_localSGD_iter=8), post_localSGD_hook)
    averager = PeriodicModelAverager(period=4, warmup_steps=8)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), 0.1), averager)
    watch(model, optimizer)
    return train(model, optimizer, rank, STEPS + 1)


@program()
def diloco(rank: int, world: int, watch: Watch) -> list[float]:
    """Inner AdamW on each rank, an outer Nesterov step on the averaged difference."""
    model = mlp()
    outer = copy.deepcopy(model)
    inner_optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    outer_optimizer = torch.optim.SGD(outer.parameters(), 0.7, momentum=0.9, nesterov=True)
    watch(model, inner_optimizer)
    losses = []
    for step in range(30):
        x, y = batch(rank, step)
        inner_optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        inner_optimizer.step()
        losses.append(loss.item())
        if step % 6 == 5:
            for kept, parameter in zip(outer.parameters(), model.parameters(), strict=True):
                kept.grad = kept.detach() - parameter.detach()
                dist.all_reduce(kept.grad)
                kept.grad /= world
            outer_optimizer.step()
            model.load_state_dict(outer.state_dict())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def gossip(rank: int, world: int, watch: Watch) -> list[float]:
    """Decentralised: after each step a rank averages with a neighbour only, by send and receive."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    watch(model, optimizer)
    losses = []
    peer = rank ^ 1
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                other = torch.empty_like(parameter)
                works = [dist.isend(parameter.detach().clone(), peer), dist.irecv(other, peer)]
                for work in works:
                    work.wait()
                parameter.add_(other).div_(2)
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses
