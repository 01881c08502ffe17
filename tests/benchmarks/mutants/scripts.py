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
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
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


SCRIPTS = {script.__name__: script for script in (ddp, fsdp2, accumulation, scaler, zero1, tensor, dropout)}
