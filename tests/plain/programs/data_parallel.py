"""DistributedDataParallel in the forms that people use it in."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.plain.kit import STEPS, Watch, assert_learned, assert_replicas_equal, batch, mlp, mse, program, train


@program()
def ddp(rank: int, world: int, watch: Watch) -> list[float]:
    model = DDP(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = train(model, optimizer, rank)
    alone = mlp()  # the same training in one process
    reference = torch.optim.AdamW(alone.parameters(), 1e-2)
    for step in range(STEPS):
        reference.zero_grad()
        for other in range(world):
            x, y = batch(other, step)
            (mse(alone(x), y) / world).backward()
        reference.step()
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), other.detach(), rtol=1e-3, atol=1e-4)
    return losses


@program(ranks=4)
def ddp_on_four_ranks(rank: int, world: int, watch: Watch) -> list[float]:
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    watch(model, optimizer)
    return train(model, optimizer, rank)


@program()
def ddp_bucket_views(rank: int, world: int, watch: Watch) -> list[float]:
    model = DDP(mlp(), gradient_as_bucket_view=True, bucket_cap_mb=1, static_graph=True)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    watch(model, optimizer)
    return train(model, optimizer, rank)


@program()
def ddp_accumulates_under_no_sync(rank: int, world: int, watch: Watch) -> list[float]:
    model = DDP(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for micro in range(3):
            x, y = batch(rank, 3 * step + micro)
            with model.no_sync() if micro < 2 else nullcontext():
                loss = mse(model(x), y) / 3
                loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def ddp_reduces_every_micro_batch(rank: int, world: int, watch: Watch) -> list[float]:
    """Wasteful, and correct."""
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        parts = []
        for micro in range(2):
            x, y = batch(rank, 2 * step + micro)
            loss = mse(model(x), y) / 2
            loss.backward()
            parts.append(loss.item())
        optimizer.step()
        losses.append(sum(parts))
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def ddp_token_weights(rank: int, world: int, watch: Watch) -> list[float]:
    """Micro-batches of uneven lengths on every rank, each token worth the same over all of them."""
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        rows = [3 + (step + 2 * rank + 5 * micro) % 7 for micro in range(2)]
        count = torch.tensor(float(sum(rows)))
        dist.all_reduce(count)
        optimizer.zero_grad()
        total = torch.zeros(())
        for micro, many in enumerate(rows):
            x, y = batch(rank, 2 * step + micro, rows=many)
            with model.no_sync() if micro == 0 else nullcontext():
                loss = (model(x) - y).square().mean(1).sum() * world / count
                loss.backward()
            total += loss.detach()
        optimizer.step()
        losses.append(total.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def ddp_fp16_hook(rank: int, world: int, watch: Watch) -> list[float]:
    model = DDP(mlp())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, optimizer)
    return train(model, optimizer, rank)


@program()
def ddp_bf16_hook(rank: int, world: int, watch: Watch) -> list[float]:
    """Torch's own refuses Gloo, so people write it."""

    def in_bf16(_, bucket):  # type: ignore[no-untyped-def]
        future = dist.all_reduce(bucket.buffer().bfloat16() / world, async_op=True).get_future()
        return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))

    model = DDP(mlp())
    model.register_comm_hook(None, in_bf16)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    return train(model, optimizer, rank)


@program()
def ddp_powersgd(rank: int, world: int, watch: Watch) -> list[float]:
    model = DDP(mlp())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=4)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, optimizer)
    return train(model, optimizer, rank)


@program()
def ddp_own_hook(rank: int, world: int, watch: Watch) -> list[float]:
    """A hook that somebody wrote: sum in double precision."""

    def in_double(_, bucket):  # type: ignore[no-untyped-def]
        gradients = bucket.buffer().double() / world
        future = dist.all_reduce(gradients, async_op=True).get_future()
        return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))

    model = DDP(mlp())
    model.register_comm_hook(None, in_double)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    return train(model, optimizer, rank)


class Branches(nn.Module):
    """One of two heads, by the step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.heads = mlp(outputs=24), nn.ModuleList(nn.Linear(24, 6) for _ in range(2))
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.heads[self.step % 2](self.trunk(x))


@program()
def ddp_unused_parameters(rank: int, world: int, watch: Watch) -> list[float]:
    """Every rank takes the same branch, another one in each step."""
    model = DDP(Branches(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        model.module.step = step
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def ddp_join(rank: int, world: int, watch: Watch) -> list[float]:
    """Uneven numbers of batches in each of several epochs, brought to an end by Join."""
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, optimizer)
    losses = []
    for _ in range(3):
        with Join([model]):
            for step in range(STEPS // 3 + 4 * rank):
                x, y = batch(rank, step)
                optimizer.zero_grad()
                loss = mse(model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def zero_redundancy_optimizer(rank: int, world: int, watch: Watch) -> list[float]:
    model = DDP(mlp())
    twin = copy.deepcopy(model.module)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    watch(model, optimizer)
    losses = train(model, optimizer, rank)
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for step in range(STEPS):
        reference.zero_grad()
        for other in range(world):
            x, y = batch(other, step)
            (mse(twin(x), y) / world).backward()
        reference.step()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), other.detach(), rtol=1e-3, atol=1e-4)
    return losses


@program()
def ddp_of_two_models(rank: int, world: int, watch: Watch) -> list[float]:
    """An encoder and a decoder, each in a wrapper of its own, one optimizer."""
    encoder, decoder = DDP(mlp(outputs=10)), DDP(mlp(inputs=10, seed=1))
    optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], 1e-2)
    watch(nn.ModuleList([encoder, decoder]), optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = mse(decoder(encoder(x)), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal([*encoder.parameters(), *decoder.parameters()])
    return losses


@program()
def ddp_with_batch_norm(rank: int, world: int, watch: Watch) -> list[float]:
    """Buffers are broadcast before each forward; between them every rank has its own."""
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 6)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, optimizer)
    return train(model, optimizer, rank)


@program()
def ddp_with_own_batch_norm(rank: int, world: int, watch: Watch) -> list[float]:
    """Statistics stay each rank's own, as `broadcast_buffers=False` asks; rank 0 looks at a sample now and then."""
    torch.manual_seed(0)
    model = DDP(
        nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 6)), broadcast_buffers=False
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if rank == 0 and step % 8 == 7:
            with torch.no_grad():
                model.module(x)
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses
