"""Half precision with and without a scaler, clipping, and noise on purpose."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.plain.kit import STEPS, Watch, assert_learned, assert_replicas_equal, batch, here, mlp, mse, program, seeded


def scaled(rank: int, watch: Watch, *, start: float, seconds: float = 0.0, clip: bool = False) -> list[float]:
    model = DDP(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler(here(), init_scale=start, growth_interval=10)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        with torch.autocast(here(), torch.float16):
            loss = mse(model(x).float(), y)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        time.sleep(seconds)
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    assert all(torch.isfinite(p).all() for p in model.parameters())
    return losses


@program()
def grad_scaler(rank: int, world: int, watch: Watch) -> list[float]:
    return scaled(rank, watch, start=2.0**10)


@program()
def grad_scaler_overflows_at_first(rank: int, world: int, watch: Watch) -> list[float]:
    return scaled(rank, watch, start=2.0**26)


@program()
def grad_scaler_overflows_in_long_steps(rank: int, world: int, watch: Watch) -> list[float]:
    return scaled(rank, watch, start=2.0**26, seconds=0.1)


@program()
def grad_scaler_and_clipping(rank: int, world: int, watch: Watch) -> list[float]:
    return scaled(rank, watch, start=2.0**26, clip=True)


@program()
def bf16_autocast(rank: int, world: int, watch: Watch) -> list[float]:
    model = DDP(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        with torch.autocast(here(), torch.bfloat16):
            loss = mse(model(x).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def bf16_with_master_weights(rank: int, world: int, watch: Watch) -> list[float]:
    """The model in BF16, the optimizer on copies in FP32."""
    model = DDP(mlp().bfloat16())
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, 1e-2)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        model.zero_grad()
        loss = mse(model(x.bfloat16()).float(), y)
        loss.backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def skips_spikes(rank: int, world: int, watch: Watch) -> list[float]:
    """A bad batch now and then: all ranks skip the step together."""
    model = DDP(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = []
    skipped = 0
    for step in range(STEPS):
        x, y = batch(rank, step)
        if step in (9, 17):
            x = x * 1e4
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        if norm > 100:
            skipped += 1
            continue
        optimizer.step()
        losses.append(loss.item())
    assert skipped == 2
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def clips_by_norm(rank: int, world: int, watch: Watch) -> list[float]:
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def clips_by_value(rank: int, world: int, watch: Watch) -> list[float]:
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def adaptive_clipping(rank: int, world: int, watch: Watch) -> list[float]:
    """AGC: each parameter's gradient is at most a share of the parameter's own norm."""
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            most = 0.05 * parameter.detach().norm().clamp(min=1e-3)
            parameter.grad.mul_((most / parameter.grad.norm().clamp(min=1e-6)).clamp(max=1))
        optimizer.step()
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def gradient_noise(rank: int, world: int, watch: Watch) -> list[float]:
    """The same noise on every rank, added after the gradients have been averaged."""
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    noise = seeded(5)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.add_(1e-3 * torch.randn(parameter.shape, generator=noise))
        optimizer.step()
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def private_sgd(rank: int, world: int, watch: Watch) -> list[float]:
    """Differential privacy: gradients of single samples clipped, noise of each rank's own, then averaged by hand."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    noise = seeded(rank)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        total = [torch.zeros_like(p) for p in model.parameters()]
        mean = 0.0
        for row, target in zip(x, y, strict=True):
            loss = mse(model(row[None]), target[None])
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            size = torch.stack([g.norm() for g in gradients]).norm()
            for whole, gradient in zip(total, gradients, strict=True):
                whole += gradient / size.clamp(min=1.0)
            mean += loss.item() / len(x)
        for parameter, whole in zip(model.parameters(), total, strict=True):
            parameter.grad = (whole + 1e-3 * torch.randn(whole.shape, generator=noise)) / len(x)
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        optimizer.step()
        losses.append(mean)
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses
