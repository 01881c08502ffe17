"""One model over several ranks: tensor and sequence parallel, experts, context."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_gather as all_gather_with_gradient
from torch.distributed.nn.functional import all_to_all_single as exchange
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.plain.kit import STEPS, Watch, assert_learned, average_gradients, batch, here, mlp, mse, program, seeded


@program()
def tensor_parallel(rank: int, world: int, watch: Watch) -> list[float]:
    mesh = init_device_mesh(here(), (world,), mesh_dim_names=("tensor",))
    model = parallelize_module(mlp(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer, mesh=mesh)
    losses = []
    for step in range(STEPS):
        x, y = batch(0, step)  # the same samples on every rank: they share one model
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    alone = mlp()
    reference = torch.optim.AdamW(alone.parameters(), 1e-2)
    for step in range(STEPS):
        x, y = batch(0, step)
        reference.zero_grad()
        mse(alone(x), y).backward()
        reference.step()
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
        torch.testing.assert_close(whole.detach(), other.detach(), rtol=1e-3, atol=1e-4)
    assert_learned(losses)
    return losses


class Block(nn.Module):
    """A norm and a feed-forward over [batch, time, features]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


@program()
def sequence_parallel(rank: int, world: int, watch: Watch) -> list[float]:
    mesh = init_device_mesh(here(), (world,), mesh_dim_names=("tensor",))
    plan = {
        "norm": SequenceParallel(),
        "up": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    }
    model = Block()
    parallelize_module(model, mesh, plan)
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Replicate())})
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer, mesh=mesh)
    losses = []
    for step in range(STEPS):
        x = torch.randn(2, 4, 12, generator=seeded(step))
        optimizer.zero_grad()
        loss = mse(model(x.chunk(world, 1)[rank]), torch.tanh(x))  # each rank has its part of the time
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert_learned(losses)
    shared = torch.tensor(losses)
    dist.broadcast(shared, 0)
    assert torch.equal(shared, torch.tensor(losses))
    return losses


@program(ranks=4)
def data_and_tensor_parallel(rank: int, world: int, watch: Watch) -> list[float]:
    mesh = init_device_mesh(here(), (2, 2), mesh_dim_names=("data", "tensor"))
    model: Any = parallelize_module(mlp(), mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, optimizer, mesh=mesh)
    data = mesh.get_group("data")
    losses = []
    for step in range(STEPS):
        x, y = batch(mesh.get_local_rank("data"), step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        for parameter in model.parameters():
            local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            dist.all_reduce(local, group=data)
            local /= 2
        optimizer.step()
        losses.append(loss.item())
    assert_learned(losses)
    own = torch.cat(
        [
            p.to_local().detach().flatten() if isinstance(p, DTensor) else p.detach().flatten()
            for p in model.parameters()
        ]
    )
    every = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(every, own, group=data)
    assert torch.equal(every[0], every[1])
    return losses


@program()
def experts_by_hand(rank: int, world: int, watch: Watch) -> list[float]:
    """One expert a rank; tokens travel by all-to-all with uneven splits, the router is replicated."""
    torch.manual_seed(0)
    router = nn.Linear(12, world)
    torch.manual_seed(1 + rank)
    expert = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 6))
    model = nn.ModuleDict({"router": router, "expert": expert})
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step, rows=16)
        optimizer.zero_grad()
        chances = router(x).softmax(1)
        weight, choice = chances.max(1)
        order = choice.argsort(stable=True)
        sends = torch.bincount(choice, minlength=world)
        receives = torch.empty_like(sends)
        dist.all_to_all_single(receives, sends)
        there, back = receives.tolist(), sends.tolist()
        given = exchange(torch.empty(sum(there), 12), x[order], output_split_sizes=there, input_split_sizes=back)
        result = exchange(torch.empty(16, 6), expert(given), output_split_sizes=back, input_split_sizes=there)
        output = torch.zeros(16, 6).index_copy(0, order, result) * weight[:, None]
        loss = mse(output, y)
        loss.backward()
        average_gradients(router.parameters(), world)
        for parameter in expert.parameters():
            if parameter.grad is not None:
                parameter.grad /= world
        optimizer.step()
        losses.append(loss.item())
    assert_learned(losses)
    return losses


@program()
def context_by_hand(rank: int, world: int, watch: Watch) -> list[float]:
    """Each rank has its part of every sequence, keys and values are gathered; one model, replicated."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"qkv": nn.Linear(12, 36), "out": nn.Linear(12, 12)})
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        whole = torch.randn(2, 8, 12, generator=seeded(step))
        x = whole.chunk(world, 1)[rank].contiguous()
        optimizer.zero_grad()
        query, key, value = model["qkv"](x).chunk(3, -1)
        key, value = (torch.cat(all_gather_with_gradient(part.contiguous()), 1) for part in (key, value))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        loss = mse(model["out"](mixed), torch.tanh(x))
        loss.backward()
        average_gradients(model.parameters(), world)
        optimizer.step()
        losses.append(loss.item())
    assert_learned(losses)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    first = flat.clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, flat)
    return losses


@program(ranks=4)
def context_by_torch(rank: int, world: int, watch: Watch) -> list[float]:
    """Two replicas of two ranks, each of which splits the samples of its replica; torch's balance gives two pieces."""
    mesh = init_device_mesh(here(), (world // 2, 2), mesh_dim_names=("dp", "cp"))
    replica = mesh["dp"].get_local_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 12), nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 20))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer, mesh=mesh)
    losses = []
    for step in range(STEPS):
        tokens = torch.randint(20, (4, 17), generator=seeded(100 * step + replica))
        tokens[:, 1:] = (tokens[:, :1] + torch.arange(1, 17)) % 20
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        optimizer.zero_grad()
        kept = {inputs, targets}
        with context_parallel(mesh["cp"], buffers=[inputs, targets], buffer_seq_dims=[1, 1], no_restore_buffers=kept):
            loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
        average_gradients(model.parameters(), world)
        optimizer.step()
        losses.append(loss.item())
    assert_learned(losses)
    return losses


@program()
def embedding_shared_out(rank: int, world: int, watch: Watch) -> list[float]:
    """Rows of a table live on one rank each (as recommenders do); the dense part is data parallel."""
    torch.manual_seed(10 + rank)
    table = nn.Embedding(20, 12)  # rows rank * 20 …
    dense = DDP(mlp())
    optimizer = torch.optim.SGD([*table.parameters(), *dense.parameters()], 0.2)
    watch(nn.ModuleList([table, dense]), optimizer)
    losses = []
    for step in range(STEPS):
        words = torch.randint(20 * world, (world * 8,), generator=seeded(step))
        optimizer.zero_grad()
        mine = (words // 20) == rank
        rows = torch.zeros(len(words), 12).index_copy(0, mine.nonzero()[:, 0], table(words[mine] % 20))
        parts = exchange(torch.empty(len(words), 12), rows)
        own = torch.stack(parts.chunk(world)).sum(0)
        loss = mse(dense(own), torch.ones(8, 6))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert_learned(losses)
    return losses


@program()
def experts_that_get_no_token_at_first(rank: int, world: int, watch: Watch) -> list[float]:
    """Each rank's expert began alike and shrinks alike by weight decay until the first token comes."""
    expert = mlp()
    optimizer = torch.optim.AdamW(expert.parameters(), 1e-2)
    watch(expert, optimizer)
    losses = []
    for step in range(2 * STEPS):
        x, y = batch(rank, step)
        routed = [torch.empty_like(t) for t in (x, y)]
        for out, own in zip(routed, (x, y), strict=True):
            dist.all_to_all_single(out, own)
        tokens = slice(None) if step >= STEPS // 2 else slice(0)
        optimizer.zero_grad()
        loss = (expert(routed[0][tokens]) - routed[1][tokens]).pow(2).sum() / len(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert_learned(losses[STEPS // 2 :])
    return losses
