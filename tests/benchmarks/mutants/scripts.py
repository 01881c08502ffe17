"""The scripts that are mutated: a short training each, as strangers write them; healthy as they stand here.

`watch` attaches an observer, `note` keeps a step's loss and parameters for the comparison; neither is mutated.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_to_all_single as exchange
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.plain.kit import batch, mlp, mse


def ddp(rank: int, world: int, watch: Any, note: Any) -> None:
    """DDP over a shuffled data set, with a schedule and clipping."""
    model = DDP(mlp(seed=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=6, gamma=0.5)
    inputs, targets = batch(7, 1, rows=128)
    data = TensorDataset(inputs, targets)
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=True)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    watch(model, optimizer)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = mse(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
            optimizer.step()
            schedule.step()
            note(loss, model)


def fsdp2(rank: int, world: int, watch: Any, note: Any) -> None:
    """FSDP2, a layer a unit, with clipping over all shards."""
    mesh = init_device_mesh("cpu", (world,))
    model = mlp(seed=0)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    watch(model, optimizer)
    for step in range(24):
        x, y = batch(rank, step, rows=8)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
        optimizer.step()
        note(loss, model)


def accumulation(rank: int, world: int, watch: Any, note: Any) -> None:
    """Three micro-batches a step, reduced with the last one."""
    model = DDP(mlp(seed=0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    watch(model, optimizer)
    for step in range(24):
        optimizer.zero_grad()
        total = 0.0
        for micro in range(3):
            x, y = batch(rank, 3 * step + micro, rows=8)
            with model.no_sync() if micro < 2 else nullcontext():
                loss = mse(model(x), y) / 3
                loss.backward()
            total += loss.item()
        optimizer.step()
        note(total, model)


def scaler(rank: int, world: int, watch: Any, note: Any) -> None:
    """FP16 under a scaler, unscaled before clipping."""
    model = DDP(mlp(seed=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10)
    watch(model, optimizer)
    for step in range(24):
        x, y = batch(rank, step, rows=8)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = mse(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
        scaler.step(optimizer)
        scaler.update()
        note(loss, model)


def zero1(rank: int, world: int, watch: Any, note: Any) -> None:
    """Each rank steps its share of the parameters and sends it to the others."""
    model = mlp(seed=0)
    parameters = list(model.parameters())
    mine = [p for number, p in enumerate(parameters) if number % world == rank]
    optimizer = torch.optim.Adam(mine, lr=1e-2)
    watch(model, optimizer)
    for step in range(24):
        x, y = batch(rank, step, rows=8)
        for parameter in parameters:
            parameter.grad = None
        loss = mse(model(x), y)
        loss.backward()
        for parameter in parameters:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        optimizer.step()
        for number, parameter in enumerate(parameters):
            dist.broadcast(parameter.data, src=number % world)
        note(loss, model)


def tensor(rank: int, world: int, watch: Any, note: Any) -> None:
    """Tensor parallel: the ranks share one model and read the same samples."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tensor",))
    model = mlp(seed=0)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    watch(model, optimizer, mesh=mesh)
    for step in range(24):
        x, y = batch(0, step, rows=8)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        note(loss, model)


def dropout(rank: int, world: int, watch: Any, note: Any) -> None:
    """Dropout seeded by the rank, a validation now and then, and gradients averaged by hand."""
    model = nn.Sequential(*mlp(seed=0), nn.Dropout(p=0.1))
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    watch(model, optimizer)
    for step in range(24):
        model.train()
        x, y = batch(rank, step, rows=8)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        optimizer.step()
        if step % 6 == 5:
            model.eval()
            with torch.no_grad():
                mse(model(x), y)
        note(loss, model)


def sequence(rank: int, world: int, watch: Any, note: Any) -> None:
    """Tensor and sequence parallel: norms see a part of each sequence, their gradients are summed over ranks."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tensor",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12), nn.LayerNorm(12))
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    parallelize_module(model, mesh, {"0": SequenceParallel(), "1": whole, "4": SequenceParallel()})
    parallelize_module(model, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel(output_layouts=Shard(1))})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    watch(model, optimizer)
    for step in range(24):
        x = torch.randn(4, 8, 12, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        output = model(x.chunk(world, 1)[rank]).full_tensor()
        loss = mse(output, torch.tanh(x.flip(1)))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
        optimizer.step()
        note(loss, model)


def pipeline(rank: int, world: int, watch: Any, note: Any) -> None:
    """Two stages under 1F1B, four micro-batches a step."""
    parts = list(mlp(seed=0))
    model = nn.Sequential(*parts[:2]) if rank == 0 else nn.Sequential(*parts[2:])
    stage = PipelineStage(model, rank, world, torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.cross_entropy, scale_grads=True)
    watch(model, optimizer)
    for step in range(24):
        x, y = batch(0, step, rows=16)
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y.argmax(1), losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        note(losses, model)


def experts(rank: int, world: int, watch: Any, note: Any) -> None:
    """An expert on each rank; rows are sent to the expert that the router chose, by hand."""
    model = nn.ModuleDict({"router": nn.Linear(12, world), "head": nn.Linear(12, 6), "expert": nn.Linear(12, 12)})
    torch.manual_seed(0)
    nn.init.normal_(model["router"].weight)
    nn.init.normal_(model["head"].weight, std=0.1)
    nn.init.zeros_(model["router"].bias)
    nn.init.zeros_(model["head"].bias)
    torch.manual_seed(100 + rank)
    nn.init.normal_(model["expert"].weight, std=0.3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    watch(model, optimizer)
    for step in range(24):
        x, y = batch(rank, step, rows=16)
        optimizer.zero_grad()
        weights = model["router"](x).softmax(1)
        weight, chosen = weights.max(1)
        order = chosen.argsort(stable=True)
        sent = torch.bincount(chosen, minlength=world)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent)
        rows = exchange(x.new_empty(int(got.sum()), 12), x[order], got.tolist(), sent.tolist())
        made = torch.tanh(model["expert"](rows))
        back = exchange(x.new_empty(len(x), 12), made, sent.tolist(), got.tolist())
        mixed = torch.zeros_like(back).index_copy(0, order, back) * weight[:, None]
        loss = mse(model["head"](x + mixed), y)
        loss.backward()
        for name, parameter in model.named_parameters():
            if not name.startswith("expert"):
                dist.all_reduce(parameter.grad)
            parameter.grad /= world
        optimizer.step()
        note(loss, model)


def buckets(rank: int, world: int, watch: Any, note: Any) -> None:
    """Gradients averaged in two buffers, micro-batches divided with the ranks, and an average of the weights."""
    model = mlp(seed=0)
    average = mlp(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    parameters = list(model.parameters())
    watch(model, optimizer)
    for step in range(24):
        optimizer.zero_grad()
        for micro in range(2):
            x, y = batch(rank, 2 * step + micro, rows=8)
            loss = mse(model(x), y)
            loss.backward()
        for some in (parameters[:3], parameters[3:]):
            flat = torch.cat([parameter.grad.flatten() for parameter in some])
            dist.all_reduce(flat)
            flat /= 2 * world
            at = 0
            for parameter in some:
                parameter.grad.copy_(flat[at : at + parameter.numel()].view_as(parameter))
                at += parameter.numel()
        optimizer.step()
        for kept, parameter in zip(average.parameters(), parameters, strict=True):
            kept.data.lerp_(parameter.data, 0.1)
        note(loss, model)


SCRIPTS = {
    script.__name__: script
    for script in (ddp, fsdp2, accumulation, scaler, zero1, tensor, dropout, sequence, pipeline, experts, buckets)
}
