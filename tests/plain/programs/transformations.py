"""What is done to gradients and weights between the backward and the next forward, all of it on purpose."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

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
from tests.plain.programs.sharded import shard


def held(tensor: Any) -> torch.Tensor:
    """What this rank has of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rates_by_depth(model: nn.Module, top: float, decay: float) -> list[dict[str, Any]]:
    """A parameter group for each layer; the deeper, the smaller its learning rate."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    return [
        {"params": list(layer.parameters()), "lr": top * decay ** (len(layers) - 1 - depth)}
        for depth, layer in enumerate(layers)
    ]


@contextmanager
def exchanged(model: nn.Module, averages: list[torch.Tensor]) -> Iterator[None]:
    """The averages in place of the weights, for as long as the context lasts."""
    trained = [held(p).detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for parameter, average in zip(model.parameters(), averages, strict=True):
            held(parameter).copy_(average)
    yield
    with torch.no_grad():
        for parameter, before in zip(model.parameters(), trained, strict=True):
            held(parameter).copy_(before)


@program()
def sharpness_aware_over_shards(rank: int, world: int, watch: Watch) -> list[float]:
    """Two backward passes a step under FSDP2: the first climbs, the second one counts."""
    model = shard(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        mse(model(x), y).backward()
        size = torch.stack([held(p.grad).square().sum() for p in model.parameters()]).sum()
        dist.all_reduce(size)
        climbed = [0.02 * held(p.grad) / size.sqrt() for p in model.parameters()]
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter, by in zip(model.parameters(), climbed, strict=True):
                held(parameter).add_(by)
        loss = mse(model(x), y)
        loss.backward()
        with torch.no_grad():
            for parameter, by in zip(model.parameters(), climbed, strict=True):
                held(parameter).sub_(by)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert_learned(losses)
    return losses


@program()
def lookahead_with_rates_by_depth(rank: int, world: int, watch: Watch) -> list[float]:
    """Slow weights of shards, every fifth step; deeper layers learn more slowly."""
    model = shard(mlp())
    optimizer = torch.optim.SGD(rates_by_depth(model, 0.2, 0.7), momentum=0.9, nesterov=True)
    watch(model, optimizer)
    slow = [held(p).detach().clone() for p in model.parameters()]
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4:
            with torch.no_grad():
                for parameter, anchor in zip(model.parameters(), slow, strict=True):
                    anchor.lerp_(held(parameter), 0.5)
                    held(parameter).copy_(anchor)
        losses.append(loss.item())
    assert_learned(losses)
    return losses


@program()
def freezes_and_unfreezes(rank: int, world: int, watch: Watch) -> list[float]:
    """The first layer rests in the middle third: its gradients are dropped before the step."""
    model = DDP(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = mse(model(x), y)
        loss.backward()
        if STEPS // 3 <= step < 2 * STEPS // 3:
            for parameter in model.module[0].parameters():
                parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert_replicas_equal(model.parameters())
    assert_learned(losses)
    return losses


@program()
def layers_take_turns_to_learn(rank: int, world: int, watch: Watch) -> list[float]:
    """`requires_grad` goes from layer to layer every fourth step; the gradients are averaged by hand."""
    model = mlp()
    layers = [m for m in model if isinstance(m, nn.Linear)]
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    watch(model, optimizer)
    losses = []
    for step in range(2 * STEPS):
        for number, layer in enumerate(layers):
            layer.requires_grad_(number == step // 4 % len(layers))
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        average_gradients(model.parameters(), world)
        optimizer.step()
        losses.append(loss.item())
    assert_replicas_equal(model.parameters())
    assert_learned(losses)
    return losses


@program()
def powersgd_of_many_micro_batches(rank: int, world: int, watch: Watch) -> list[float]:
    """Low-rank reduction with error feedback after some exact steps; accumulated, then clipped."""
    model = DDP(mlp(hidden=48))
    state = powerSGD_hook.PowerSGDState(
        dist.group.WORLD, matrix_approximation_rank=2, start_powerSGD_iter=6, min_compression_rate=1
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        with model.no_sync():
            x, y = batch(rank, 2 * step)
            (mse(model(x), y) / 2).backward()
        x, y = batch(rank, 2 * step + 1)
        loss = mse(model(x), y)
        (loss / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert_replicas_equal(model.parameters())
    assert_learned(losses)
    return losses


@program()
def half_precision_messages_and_clipped_values(rank: int, world: int, watch: Watch) -> list[float]:
    """FP16 messages, then each value of the averages is clipped; rates by depth."""
    model = DDP(mlp())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.AdamW(rates_by_depth(model, 2e-2, 0.5))
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = mse(model(x), y)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert_replicas_equal(model.parameters())
    assert_learned(losses)
    return losses


@program()
def centred_gradients(rank: int, world: int, watch: Watch) -> list[float]:
    """Gradient centralisation under FSDP2: every row of a matrix's gradient has its mean taken away."""
    model = shard(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = mse(model(x), y)
        loss.backward()
        for parameter in model.parameters():
            mine = held(parameter.grad)
            if mine.ndim == 2 and mine.numel():
                mine.sub_(mine.mean(dim=1, keepdim=True))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert_learned(losses)
    return losses


class RoundsAtRandom(torch.optim.Optimizer):
    """SGD with momentum in FP32; its BF16 weights are rounded up or down at random, alike on every rank."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.chance = seeded(7)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter, dtype=torch.float32)
                state["momentum"].mul_(0.9).add_(parameter.grad.float())
                exact = parameter.float() - group["lr"] * state["momentum"]
                noise = torch.randint(0, 1 << 16, exact.shape, generator=self.chance, dtype=torch.int32)
                cut = (exact.view(torch.int32) + noise) & -(1 << 16)
                parameter.copy_(cut.view(torch.float32))


@program()
def rounds_at_random(rank: int, world: int, watch: Watch) -> list[float]:
    """BF16 weights without a master copy that learn all the same."""
    model = mlp().bfloat16()
    optimizer = RoundsAtRandom(model.parameters(), 0.02)
    watch(model, optimizer, replicas=dist.group.WORLD)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = mse(model(x.bfloat16()).float(), y)
        loss.backward()
        average_gradients(model.parameters(), world)
        optimizer.step()
        losses.append(loss.item())
    assert_replicas_equal(model.parameters())
    assert_learned(losses)
    return losses


@program()
def equal_prompts_over_shards(rank: int, world: int, watch: Watch) -> list[float]:
    """Every rank has the same prompts, and draws its own answers to them; rewards are centred over all ranks."""
    model = shard(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    own = seeded(100 + rank)
    losses = []
    for step in range(3 * STEPS):
        x, _ = batch(0, step % 4, rows=16)
        wanted = x[:, :6].argmax(dim=1)
        scores = model(x)
        drawn = torch.multinomial(scores.detach().softmax(dim=1), 1, generator=own).squeeze(1)
        reward = (drawn == wanted).float()
        mean = reward.mean()
        dist.all_reduce(mean)
        loss = ((reward - mean / world) * nn.functional.cross_entropy(scores, drawn, reduction="none")).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(nn.functional.cross_entropy(scores.detach(), wanted).item())
    assert_learned(losses)
    return losses


@program()
def validates_with_averages_of_shards(rank: int, world: int, watch: Watch) -> list[float]:
    """An exponential average of each rank's shards is exchanged for the weights in each validation, and back."""
    model = shard(nn.Sequential(*mlp(), nn.Dropout(0.1)))
    torch.manual_seed(1 + rank)  # each rank drops units of its own
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    averages = [held(p).detach().clone() for p in model.parameters()]
    losses = []
    for step in range(STEPS):
        model.train()
        x, y = batch(rank, step)
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for average, parameter in zip(averages, model.parameters(), strict=True):
            average.lerp_(held(parameter).detach(), 0.2)
        losses.append(loss.item())
        if step % 6 == 5:
            model.eval()
            with exchanged(model, averages), torch.no_grad():
                assert torch.isfinite(mse(model(x), y))
    assert_learned(losses)
    return losses


@program()
def averages_its_last_weights(rank: int, world: int, watch: Watch) -> list[float]:
    """The mean of the weights of the last steps is what is kept; batch norm's statistics are taken anew for it."""
    body = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 6))
    torch.manual_seed(0)
    for layer in (body[0], body[3]):
        layer.reset_parameters()  # type: ignore[operator]
    model = DDP(body)
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    mean = torch.optim.swa_utils.AveragedModel(body)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step >= 2 * STEPS // 3:
            mean.update_parameters(body)
    with torch.no_grad():
        for parameter, average in zip(body.parameters(), mean.parameters(), strict=True):
            parameter.copy_(average)
    torch.optim.swa_utils.update_bn((batch(rank, s)[0] for s in range(4)), body)
    assert_replicas_equal(body.parameters())
    assert_learned(losses)
    return losses


@program()
def clips_each_unit_and_adds_noise(rank: int, world: int, watch: Watch) -> list[float]:
    """Adaptive clipping by the norm of each row under FSDP2, then noise that every rank draws for its shards."""
    model = shard(mlp())
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    watch(model, optimizer)
    own = seeded(rank)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = mse(model(x), y)
        loss.backward()
        for parameter in model.parameters():
            mine, weights = held(parameter.grad), held(parameter).detach()
            if mine.ndim == 2 and mine.numel():
                most = 0.05 * weights.norm(dim=1, keepdim=True).clamp(min=1e-3)
                mine.mul_((most / mine.norm(dim=1, keepdim=True).clamp(min=1e-6)).clamp(max=1.0))
            mine.add_(torch.randn(mine.shape, generator=own), alpha=1e-3)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert_learned(losses)
    return losses


@program()
def begins_its_moments_anew(rank: int, world: int, watch: Watch) -> list[float]:
    """Warm restarts: every eighth step the optimizer forgets its moments, as some schedules want it."""
    model = DDP(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 8)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 8 == 7:
            optimizer.state.clear()
        losses.append(loss.item())
    assert_replicas_equal(model.parameters())
    assert_learned(losses)
    return losses


class Balanced(nn.Module):
    """Experts that are balanced by a bias, which follows the loads of all ranks; and what each rank counts alone."""

    bias: torch.Tensor
    table: torch.Tensor
    own: torch.Tensor
    best: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(12, 4)
        self.experts = nn.ModuleList(nn.Linear(12, 6) for _ in range(4))
        self.register_buffer("bias", torch.zeros(4))
        self.register_buffer("table", torch.linspace(0, 1, 12).cos())
        self.register_buffer("own", torch.zeros(4))
        self.register_buffer("best", torch.full((40,), float("inf")))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x * (1 + 0.1 * self.table)).softmax(dim=1)
        chosen = nn.functional.one_hot((scores.detach() + self.bias).argmax(dim=1), 4).float()
        self.own += chosen.sum(dim=0)
        loads = chosen.mean(dim=0)
        dist.all_reduce(loads)
        self.bias -= 0.01 * (loads - loads.mean()).sign()
        weights = scores * chosen
        return torch.stack([weights[:, n, None] * e(x) for n, e in enumerate(self.experts)]).sum(dim=0)


@program()
def balances_its_experts_by_a_bias(rank: int, world: int, watch: Watch) -> list[float]:
    """One buffer moves alike on all ranks, one never; two belong to each rank alone, and one of those moves late."""
    model = DDP(Balanced(), broadcast_buffers=False, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-2)
    watch(model, optimizer)
    losses = []
    for step in range(3 * STEPS):
        x, y = batch(rank, step)
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if rank == 0 and step % 40 == 39:
            model.module.best.fill_(loss.item())
    assert_learned(losses)
    return losses


@program()
def averages_directions(rank: int, world: int, watch: Watch) -> list[float]:
    """Each rank normalises its gradients before they are averaged; the best weights are put back at the end."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    watch(model, optimizer)
    losses, kept = [], copy.deepcopy(model.state_dict())
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        for parameter in model.parameters():
            parameter.grad /= parameter.grad.norm() + 1e-6  # type: ignore[operator]
        average_gradients(model.parameters(), world)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if not losses or mean.item() / world < min(losses):
            kept = copy.deepcopy(model.state_dict())
        losses.append(mean.item() / world)
    model.load_state_dict(kept)
    assert_replicas_equal(model.parameters())
    assert_learned(losses)
    return losses
