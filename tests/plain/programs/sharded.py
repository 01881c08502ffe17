"""Parameters or optimizer states that are shared out: FSDP1, FSDP2, HSDP and ZeRO by hand."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor

from tests.plain.kit import (
    STEPS,
    Watch,
    assert_learned,
    assert_replicas_equal,
    average_gradients,
    batch,
    here,
    mlp,
    mse,
    program,
)


def reference(world: int, rate: float = 1e-2) -> nn.Module:
    """The model after the same training in one process."""
    alone = mlp()
    optimizer = torch.optim.AdamW(alone.parameters(), rate)
    for step in range(STEPS):
        optimizer.zero_grad()
        for other in range(world):
            x, y = batch(other, step)
            (mse(alone(x), y) / world).backward()
        optimizer.step()
    return alone


def train(model: Any, optimizer: Any, rank: int) -> list[float]:
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert_learned(losses)
    return losses


def full(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def assert_like_reference(model: nn.Module, world: int) -> None:
    for mine, other in zip(model.parameters(), reference(world).parameters(), strict=True):
        torch.testing.assert_close(full(mine).detach(), other.detach(), rtol=1e-3, atol=1e-4)


def shard(model: nn.Sequential, **options: Any) -> nn.Sequential:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


@program()
def fsdp2(rank: int, world: int, watch: Watch) -> list[float]:
    model = shard(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = train(model, optimizer, rank)
    assert_like_reference(model, world)
    return losses


@program()
def fsdp2_keeps_parameters_after_forward(rank: int, world: int, watch: Watch) -> list[float]:
    model = shard(mlp(), reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = train(model, optimizer, rank)
    assert_like_reference(model, world)
    return losses


@program()
def fsdp2_in_bf16(rank: int, world: int, watch: Watch) -> list[float]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(mlp(), mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = mse(model(x).float(), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert_learned(losses)
    return losses


@program()
def fsdp2_accumulates(rank: int, world: int, watch: Watch) -> list[float]:
    model = shard(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            x, y = batch(rank, 2 * step + micro)
            loss = mse(model(x), y) / 2
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    assert_learned(losses)
    return losses


@program(ranks=4)
def hsdp(rank: int, world: int, watch: Watch) -> list[float]:
    mesh = init_device_mesh(here(), (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(mlp(), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer, mesh=mesh)
    losses = train(model, optimizer, rank)
    assert_like_reference(model, world)
    return losses


@program()
def fsdp1(rank: int, world: int, watch: Watch) -> list[float]:
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=300)
    model = FullyShardedDataParallel(mlp(), auto_wrap_policy=policy, device_id=torch.get_default_device())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    return train(model, optimizer, rank)


@program()
def fsdp1_with_original_parameters(rank: int, world: int, watch: Watch) -> list[float]:
    model = FullyShardedDataParallel(
        mlp(),
        use_orig_params=True,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        device_id=torch.get_default_device(),
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        losses.append(loss.item())
    assert_learned(losses)
    return losses


@program()
def zero1_by_hand(rank: int, world: int, watch: Watch) -> list[float]:
    """Each rank steps its share of the parameters and broadcasts it afterwards."""
    model = mlp()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters[rank::world], 1e-2)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        model.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        average_gradients(parameters, world)
        optimizer.step()
        with torch.no_grad():
            for number, parameter in enumerate(parameters):
                dist.broadcast(parameter, number % world)
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(parameters)
    assert_like_reference(model, world)
    return losses


@program()
def zero1_gathers_in_the_next_forward(rank: int, world: int, watch: Watch) -> list[float]:
    """As Megatron's distributed optimizer: gradients scattered, and parameters gathered as late as they are needed."""
    model = mlp()
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    size = -(-len(flat) // world)
    padded = torch.zeros(size * world)
    padded[: len(flat)] = flat
    own = nn.Parameter(padded[rank * size : (rank + 1) * size].clone())
    optimizer = torch.optim.AdamW([own], 1e-2)
    watch(model, optimizer)

    def gather(*_: object) -> None:
        dist.all_gather_into_tensor(padded, own.detach())
        with torch.no_grad():
            nn.utils.vector_to_parameters(padded[: len(flat)].clone(), model.parameters())

    model.register_forward_pre_hook(gather)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = mse(model(x), y)
        gradients = torch.zeros(size * world)
        gradients[: len(flat)] = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        own.grad = torch.empty(size)
        dist.reduce_scatter_tensor(own.grad, gradients / world)
        optimizer.step()
        losses.append(loss.item())
    assert_learned(losses)
    gather()
    assert_replicas_equal(model.parameters())
    assert_like_reference(model, world)
    return losses
