"""Ranks, data, models and phases arranged in less usual ways, as they stand in public training code."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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
    seeded,
)
from tests.plain.programs.recipes import Language


@program()
def clients_average_by_their_samples(rank: int, world: int, watch: Watch) -> list[float]:
    """Federated averaging: each client has its own data, its own number of local steps and its own head."""
    body, head = mlp(12, 24, 16), mlp(16, 16, 6, seed=rank)
    model = nn.Sequential(body, head)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = []
    for turn in range(8):
        for step in range(3 + 2 * rank):
            x, y = batch(rank, 10 * turn + step)
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        share = torch.tensor(float(3 + 2 * rank))
        total = share.clone()
        dist.all_reduce(total)
        with torch.no_grad():
            for parameter in body.parameters():
                parameter.mul_(share / total)
                dist.all_reduce(parameter)
    assert_replicas_equal(body.parameters())
    assert_learned(losses)
    return losses


@program()
def fsdp2_with_parameters_on_the_host(rank: int, world: int, watch: Watch) -> list[float]:
    """Shards are kept off the device; gradients of frozen layers do not exist."""
    model = mlp()
    model[0].requires_grad_(False)
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2, foreach=False)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = mse(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert_learned(losses)
    return losses


@program()
def batch_size_grows(rank: int, world: int, watch: Watch) -> list[float]:
    """More micro-batches as training goes on, and longer sequences."""
    torch.manual_seed(5 + rank)
    model = DDP(Language())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    made = seeded(rank)
    losses = []
    for step in range(STEPS):
        count, length = 1 + step // 8, 4 + 2 * (step // 6)
        for micro in range(count):
            ids = torch.randint(0, 31, (4, 1), generator=made) + torch.zeros(1, length + 1, dtype=torch.long)
            with torch.enable_grad() if micro == count - 1 else model.no_sync():
                _, loss = model(ids[:, :-1], ids[:, 1:])
                (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert_replicas_equal(model.parameters())
    assert_learned(losses)
    return losses


def _forever(loader: DataLoader[Any], sampler: DistributedSampler[Any]) -> Iterator[Any]:
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


@program()
def saves_and_rolls_back(rank: int, world: int, watch: Watch) -> list[float]:
    """Rank 0 saves, all wait; when the loss is bad all load what was saved and go on with a smaller rate."""
    data = TensorDataset(torch.randn(40, 12, generator=seeded(1)))
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    stream = _forever(DataLoader(data, batch_size=5, sampler=sampler), sampler)
    model = DDP(mlp())
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    watch(model, optimizer)
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    path = Path(folder[0], "last.pt")
    losses = []
    for step in range(2 * STEPS):
        (x,) = next(stream)
        loss = mse(model(x), torch.tanh(x[:, :6]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 9:
            if rank == 0:
                torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, path)
            dist.barrier()
        if step == 25:
            state = torch.load(path, weights_only=True)
            model.module.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            for group in optimizer.param_groups:
                group["lr"] /= 2
    assert_replicas_equal(model.parameters())
    assert_learned(losses)
    return losses


@program()
def tasks_take_turns(rank: int, world: int, watch: Watch) -> list[float]:
    """One body, a head for each task; each step all ranks train the task whose turn it is, the other head rests."""
    body = mlp(12, 24, 16)
    heads = nn.ModuleList(mlp(16, 8, 6, seed=n) for n in range(3))

    class Tasks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.heads = body, heads

        def forward(self, x: torch.Tensor, task: int) -> torch.Tensor:
            return self.heads[task](self.body(x))  # type: ignore[no-any-return]

    model = DDP(Tasks(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    watch(model, optimizer)
    chosen = seeded(9)
    losses = []
    for step in range(3 * STEPS):
        task = int(torch.randint(3, (), generator=chosen))
        x, y = batch(rank, step)
        loss = mse(model(x, task), y.roll(task, 1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert_replicas_equal(model.parameters())
    assert_learned(losses)
    return losses


@program()
def half_precision_by_hand(rank: int, world: int, watch: Watch) -> list[float]:
    """FP32 master weights, BF16 copies in the model, a loss scale by hand, steps that all agree to skip."""
    model = mlp().to(torch.bfloat16)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, 1e-2)
    watch(model, optimizer)
    scale, losses = 2.0**10, []
    for step in range(2 * STEPS):
        x, y = batch(rank, step)
        loss = mse(model(x.bfloat16()).float(), y)
        (loss * scale).backward()
        if step == 11 and rank == 1:
            next(model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
        bad = torch.zeros(1)
        for master, parameter in zip(masters, model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float() / scale
            bad += (~torch.isfinite(master.grad)).any()
            parameter.grad = None
        dist.all_reduce(bad)
        if bad.item():
            scale /= 2
            continue
        average_gradients(masters, world)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        losses.append(loss.item())
    assert_replicas_equal(model.parameters())
    assert_learned(losses)
    return losses


@program()
def grows_its_layers(rank: int, world: int, watch: Watch) -> list[float]:
    """A new layer in mid-run: the model is wrapped again and the optimizer made anew."""
    torch.manual_seed(2)
    layers = [nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 6)]
    losses: list[float] = []
    for size in range(3):
        plain = nn.Sequential(*layers)
        for parameter in plain.parameters():
            dist.broadcast(parameter.detach(), 0)
        model = DDP(plain)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        watch(model, optimizer) if size == 0 else None
        for step in range(STEPS):
            x, y = batch(rank, 100 * size + step)
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        layers = [*layers[:-1], nn.Linear(24, 24), nn.Tanh(), layers[-1]]
    assert_replicas_equal(plain.parameters())
    assert_learned(losses)
    return losses


@program(ranks=4)
def trainers_and_evaluators(rank: int, world: int, watch: Watch) -> list[float]:
    """Two ranks train; the other two evaluate what they are sent, and never make an optimizer."""
    trainers = dist.new_group([0, 1])
    dist.new_group([2, 3])
    model = mlp()
    losses = []
    if rank < 2:
        wrapped = DDP(model, process_group=trainers)
        optimizer = torch.optim.AdamW(wrapped.parameters(), 1e-2)
        watch(wrapped, optimizer)
    else:
        watch(model)
    for step in range(STEPS):
        if rank < 2:
            x, y = batch(rank, step)
            loss = mse(wrapped(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if step % 8 == 7:
            for parameter in model.parameters():
                dist.broadcast(parameter.detach(), 0)
            if rank >= 2:
                model.eval()
                with torch.no_grad():
                    mse(*(lambda pair: (model(pair[0]), pair[1]))(batch(rank, step)))
            dist.barrier()
    assert_replicas_equal(model.parameters())
    if rank < 2:
        assert_learned(losses)
    return losses


@program()
def batches_by_the_speed_of_ranks(rank: int, world: int, watch: Watch) -> list[float]:
    """The faster rank takes twice the samples, and every sample counts the same in the average."""
    model = DDP(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    sizes = [16, 8]
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step, rows=sizes[rank])
        loss = functional.cross_entropy(model(x), y.argmax(1), reduction="sum")
        (loss * world / sum(sizes)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() / sizes[rank])
    assert_replicas_equal(model.parameters())
    assert_learned(losses)
    return losses


@program()
def two_phases_of_each_epoch(rank: int, world: int, watch: Watch) -> list[float]:
    """The loader is read twice in an epoch: first the body trains, then the head."""
    data = TensorDataset(torch.randn(48, 12, generator=seeded(1)))
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=2)
    loader = DataLoader(data, batch_size=6, sampler=sampler)
    model = DDP(mlp(), find_unused_parameters=True)
    body, head = list(model.module[:4].parameters()), list(model.module[4].parameters())
    optimizers = [torch.optim.Adam(part, 1e-2) for part in (body, head)]
    watch(model, optimizers)
    losses = []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for optimizer in optimizers:
            for (x,) in loader:
                loss = mse(model(x), torch.tanh(x[:, :6]))
                model.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    assert_replicas_equal(model.parameters())
    assert_learned(losses)
    return losses


class _CopyToRanks(torch.autograd.Function):
    """Identity, whose backward sums over a tensor-parallel group."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        summed = gradients[0].contiguous().clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


class _SumOverRanks(torch.autograd.Function):
    """A sum over a tensor-parallel group, whose backward is the identity."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        summed = x.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


class _SplitBlock(nn.Module):
    """A norm on every rank, a layer split by columns, one split by rows."""

    def __init__(self, width: int, place: int, group: Any, seed: int) -> None:
        super().__init__()
        self.norm, self.group = nn.LayerNorm(width), group
        whole = mlp(width, 2 * width, width, seed=seed)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.bias = nn.Parameter(torch.zeros(width))
        with torch.no_grad():
            self.up.weight.copy_(whole[0].weight[place * width : (place + 1) * width])  # type: ignore[index]
            self.up.bias.zero_()
            self.down.weight.copy_(whole[4].weight[:, place * width : (place + 1) * width])  # type: ignore[index]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = functional.gelu(self.up(_CopyToRanks.apply(self.norm(x), self.group)))
        return x + functional.dropout(_SumOverRanks.apply(self.down(inner), self.group) + self.bias, 0.05)


@program(ranks=4)
def tensor_parallel_by_hand(rank: int, world: int, watch: Watch) -> list[float]:
    """Two ways of splitting the layers, two of the data; groups made by hand, nothing says which is which."""
    tensor = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    data = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), *(_SplitBlock(16, rank % 2, tensor, n) for n in range(2)))
    model.append(nn.Linear(16, 6))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    torch.manual_seed(500 + rank // 2)
    losses = []
    for step in range(2 * STEPS):
        x, y = batch(rank // 2, step)
        loss = mse(model(x), y)
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=data)
            parameter.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert_learned(losses)
    return losses


@program()
def broadcasts_what_it_begins_with(rank: int, world: int, watch: Watch) -> list[float]:
    """Each rank makes its own model; rank 0's is sent to the others when everything else is ready."""
    model = mlp(seed=rank)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    with torch.no_grad():
        model(batch(rank, 0)[0])  # a look at the shapes
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), 0)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = mse(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model.parameters(), world)
        optimizer.step()
        losses.append(loss.item())
    assert_replicas_equal(model.parameters())
    assert_learned(losses)
    return losses


@program()
def learner_and_actor(rank: int, world: int, watch: Watch) -> list[float]:
    """Rank 1 only makes data with the newest weights; rank 0 trains on it and sends the weights back."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2) if rank == 0 else None
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(0, step)
        if rank == 1:
            with torch.no_grad():
                made = x + 0.01 * model(x).mean()
            dist.send(made, 0)
        else:
            assert optimizer is not None
            made = torch.empty_like(x)
            dist.recv(made, 1)
            loss = mse(model(made), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), 0)
    assert_replicas_equal(model.parameters())
    if rank == 0:
        assert_learned(losses)
    return losses


@program()
def keeps_what_it_has_seen(rank: int, world: int, watch: Watch) -> list[float]:
    """A replay buffer of each rank that fills up and is drawn from; a target network follows."""
    online = DDP(mlp())
    target = copy.deepcopy(online.module).requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), 5e-3)
    watch(online, optimizer)
    drawn = seeded(rank)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    losses = []
    for step in range(3 * STEPS):
        seen.append(batch(rank, step))
        if len(seen) > 40:
            seen.pop(0)
        if step < 4:
            continue
        chosen = torch.randint(len(seen), (2,), generator=drawn).tolist()
        x, y = torch.cat([seen[n][0] for n in chosen]), torch.cat([seen[n][1] for n in chosen])
        loss = functional.smooth_l1_loss(online(x), y + 0.1 * target(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), online.module.parameters(), strict=True):
                slow.lerp_(fast, 0.02)
        losses.append(loss.item())
    assert_replicas_equal(online.parameters())
    assert_learned(losses)
    return losses
