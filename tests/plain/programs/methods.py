"""Trainings by other methods: searches among models, averages of weights, learning from preferences or few labels."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.nn.utils.parametrizations import spectral_norm

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
    seeded,
)


@program()
def population(rank: int, world: int, watch: Watch) -> list[float]:
    """Each rank trains at a rate of its own; now and then the worse takes weights and rate of the better."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.02 * (rank + 1))
    watch(model, optimizer)
    losses = []
    for step in range(2 * STEPS):
        x, y = batch(rank, step)
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 12 == 11:
            scores: list[Any] = [None] * world
            dist.all_gather_object(scores, (sum(losses[-12:]), optimizer.param_groups[0]["lr"]))
            best = min(range(world), key=lambda r: scores[r][0])
            worst = max(range(world), key=lambda r: scores[r][0])
            flat = parameters_to_vector(model.parameters()).detach()
            dist.broadcast(flat, best)
            if rank == worst:
                vector_to_parameters(flat, model.parameters())
                optimizer.param_groups[0]["lr"] = 1.2 * scores[best][1]
    assert_learned(losses)
    return losses


@program()
def sweep_of_rates(rank: int, world: int, watch: Watch) -> list[float]:
    """A search for the best rate: the same beginning and the same data everywhere, compared at the end."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.02 * (rank + 1), momentum=0.9)
    watch(model, optimizer)
    losses = []
    for step in range(2 * STEPS):
        x, y = batch(0, step)
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    scores: list[Any] = [None] * world
    dist.all_gather_object(scores, sum(losses[-8:]))
    assert_learned(losses)
    return losses


@program()
def cross_validation(rank: int, world: int, watch: Watch) -> list[float]:
    """Each rank leaves out another fold of one data set; all begin alike, and their scores are averaged."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    watch(model, optimizer)
    x, y = batch(0, 0, rows=64)
    fold = torch.arange(64) % world == rank
    losses = []
    for step in range(2 * STEPS):
        drawn = seeded(step)
        mine = torch.arange(64)[~fold][torch.randperm(64 - 64 // world, generator=drawn)[:8]]
        loss = mse(model(x[mine]), y[mine])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        score = mse(model(x[fold]), y[fold])
    dist.all_reduce(score)
    assert_learned(losses)
    return losses


@program()
def evolution(rank: int, world: int, watch: Watch) -> list[float]:
    """No backward pass: each rank tries its own changes of the weights, and all take the same weighted sum of them."""
    model = mlp(12, 8, 6)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    watch(model, optimizer)
    weights, losses = parameters_to_vector(model.parameters()).detach(), []
    for step in range(2 * STEPS):
        x, y = batch(0, step % 4)
        rewards = torch.zeros(world, 8)
        with torch.no_grad():
            for trial in range(8):
                change = torch.randn(weights.shape, generator=seeded(97 * step + 8 * rank + trial))
                vector_to_parameters(weights + 0.05 * change, model.parameters())
                rewards[rank, trial] = -mse(model(x), y)
            dist.all_reduce(rewards)
            ranked = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
            gradient = torch.zeros_like(weights)
            for other in range(world):
                for trial in range(8):
                    made = seeded(97 * step + 8 * other + trial)
                    gradient -= ranked[other, trial] * torch.randn(weights.shape, generator=made)
            vector_to_parameters(weights, model.parameters())
            at = 0
            for parameter in model.parameters():
                parameter.grad = (gradient[at : at + parameter.numel()] / (8 * world)).view_as(parameter).clone()
                at += parameter.numel()
        optimizer.step()
        weights = parameters_to_vector(model.parameters()).detach()
        losses.append(-float(rewards.mean()))
    assert_replicas_equal(model.parameters())
    assert_learned(losses)
    return losses


@program()
def two_forwards_and_no_gradient(rank: int, world: int, watch: Watch) -> list[float]:
    """Fine-tuning without a backward: weights are moved along a direction, there and back, and stepped along it."""
    model = mlp(12, 8, 6)
    watch(model)
    losses = []

    def moved(seed: int, size: float) -> None:
        made = seeded(seed)
        for parameter in model.parameters():
            parameter.data.add_(torch.randn(parameter.shape, generator=made), alpha=size)

    with torch.no_grad():
        for step in range(4 * STEPS):
            x, y = batch(rank, step)
            moved(step, 1e-3)
            above = mse(model(x), y)
            moved(step, -2e-3)
            below = mse(model(x), y)
            moved(step, 1e-3)
            slope = (above - below) / 2e-3
            dist.all_reduce(slope)
            moved(step, -5e-4 * max(-40.0, min(40.0, float(slope) / world)))
            losses.append(float(above))
    assert_replicas_equal(model.parameters())
    return losses


@program()
def averages_while_it_trains(rank: int, world: int, watch: Watch) -> list[float]:
    """No schedule: gradients are taken between an average and a fast point, and evaluation looks at the average."""

    class Free(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.05, "at": 0.9})

        @torch.no_grad()
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1
                for parameter in group["params"]:
                    state = self.state[parameter]
                    fast = state.setdefault("fast", parameter.clone())
                    mean = state.setdefault("mean", parameter.clone())
                    fast.sub_(parameter.grad, alpha=group["lr"])
                    mean.lerp_(fast, 1 / group["count"])
                    parameter.copy_(fast.lerp(mean, group["at"]))

        @torch.no_grad()
        def look(self, *, average: bool) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if state := self.state.get(parameter):
                        between = state["fast"].lerp(state["mean"], group["at"])
                        parameter.copy_(state["mean"] if average else between)

    model = DDP(mlp())
    optimizer = Free(model.parameters())
    watch(model, optimizer)
    losses = []
    for step in range(2 * STEPS):
        if step % 8 == 0:
            model.eval()
            optimizer.look(average=True)
            with torch.no_grad():
                mse(model(batch(rank, 9_000)[0]), batch(rank, 9_000)[1])
            optimizer.look(average=False)
            model.train()
        x, y = batch(rank, step)
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert_replicas_equal(model.parameters())
    assert_learned(losses)
    return losses


@program()
def slow_and_fast_weights(rank: int, world: int, watch: Watch) -> list[float]:
    """Lookahead: an optimizer around another one; every fifth step goes half of the way back to the slow weights."""

    class Lookahead:
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner, self.count = inner, 0
            self.param_groups = inner.param_groups
            self.slow = [[p.detach().clone() for p in group["params"]] for group in inner.param_groups]

        def step(self) -> None:
            self.inner.step()
            self.count += 1
            if self.count % 5 == 0:
                with torch.no_grad():
                    for kept, group in zip(self.slow, self.param_groups, strict=True):
                        for slow, parameter in zip(kept, group["params"], strict=True):
                            slow.lerp_(parameter, 0.5)
                            parameter.copy_(slow)

        def zero_grad(self) -> None:
            self.inner.zero_grad()

    model = DDP(mlp())
    inner = torch.optim.Adam(model.parameters(), 3e-3)
    watch(model, inner)
    optimizer = Lookahead(inner)
    losses = []
    for step in range(2 * STEPS):
        x, y = batch(rank, step)
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert_replicas_equal(model.parameters())
    assert_learned(losses)
    return losses


@program()
def preferences(rank: int, world: int, watch: Watch) -> list[float]:
    """DPO with adapters: the reference is the same model with its adapters switched off."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = mlp(12, 24, 6)
            for parameter in self.base.parameters():
                parameter.requires_grad_(False)
            made = seeded(8)
            self.down = nn.Parameter(0.1 * torch.randn(12, 2, generator=made))
            self.up = nn.Parameter(torch.zeros(2, 6))
            self.on = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = self.base(x)
            return functional.log_softmax(found + x @ self.down @ self.up if self.on else found, -1)

    model = Adapted()
    wrapped = DDP(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 2e-2)
    watch(wrapped, optimizer)
    losses = []
    for step in range(2 * STEPS):
        x, y = batch(rank, step)
        good, bad = y.argmax(1), y.argmin(1)
        both = wrapped(torch.cat([x, x]))
        model.on = False
        with torch.no_grad():
            reference = model(torch.cat([x, x]))
        model.on = True
        which = torch.cat([good, bad])[:, None]
        ratio = (both - reference).gather(1, which)[:, 0]
        loss = -functional.logsigmoid(2.0 * (ratio[: len(x)] - ratio[len(x) :])).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert_replicas_equal(model.parameters())
    assert_learned(losses)
    return losses


@program()
def normed_spectrally(rank: int, world: int, watch: Watch) -> list[float]:
    """Weights are divided by their largest singular value; its vectors are buffers that each forward improves."""
    torch.manual_seed(5)
    model = nn.Sequential(spectral_norm(nn.Linear(12, 24)), nn.ReLU(), spectral_norm(nn.Linear(24, 24)), nn.ReLU())
    model.append(nn.Linear(24, 6))
    wrapped = DDP(model)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    watch(wrapped, optimizer)
    losses = []
    for step in range(2 * STEPS):
        x, y = batch(rank, step)
        loss = mse(wrapped(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert_replicas_equal(model.parameters())
    assert_learned(losses)
    return losses


@program()
def dead_units_begin_anew(rank: int, world: int, watch: Watch) -> list[float]:
    """A sparse autoencoder: units that no rank used for a while get new weights and an optimizer state of zero."""
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 12))
    with torch.no_grad():
        model[0].bias[:6] = -20.0
    wrapped = DDP(model)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    watch(wrapped, optimizer)
    fired, losses = torch.zeros(40), []

    def counts(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        fired.add_((output.detach() > 0).float().sum(0))

    model[1].register_forward_hook(counts)
    for step in range(2 * STEPS):
        x, _ = batch(rank, step)
        loss = mse(wrapped(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model[2].weight.div_(model[2].weight.norm(dim=0, keepdim=True).clamp(min=1))
            if step % 12 == 11:
                dist.all_reduce(fired)
                dead = fired == 0
                made = seeded(step)
                fresh = 0.1 * torch.randn(40, 12, generator=made)
                for tensor, value in ((model[0].weight, fresh), (model[0].bias, torch.zeros(40))):
                    tensor[dead] = value[dead]
                    state = optimizer.state[tensor]
                    state["exp_avg"][dead] = 0
                    state["exp_avg_sq"][dead] = 0
                fired.zero_()
        losses.append(loss.item())
    assert_replicas_equal(model.parameters())
    assert_learned(losses)
    return losses


@program()
def half_supervised(rank: int, world: int, watch: Watch) -> list[float]:
    """Few labels and many guesses: a sample without a label counts only where the model is sure, at first nowhere."""
    model = DDP(mlp())
    average = copy.deepcopy(model.module)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    watch(model, optimizer)
    losses = []
    for step in range(2 * STEPS):
        x, y = batch(rank, step)
        unknown = batch(rank, 5_000 + step, rows=16)[0]
        made = seeded(31 * step + rank)
        labelled, weak, strong = model(
            torch.cat([x, unknown, unknown + 0.3 * torch.randn(unknown.shape, generator=made)])
        ).split([8, 16, 16])
        chance, guess = weak.detach().softmax(1).max(1)
        sure = (chance > 0.35).float()
        guessed = (functional.cross_entropy(strong, guess, reduction="none") * sure).mean()
        loss = functional.cross_entropy(labelled, y.argmax(1)) + guessed
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, quick in zip(average.parameters(), model.module.parameters(), strict=True):
                slow.lerp_(quick, 0.1)
        losses.append(functional.cross_entropy(labelled.detach(), y.argmax(1)).item())
    assert_replicas_equal([*model.parameters(), *average.parameters()])
    assert_learned(losses)
    return losses


@program(4)
def hsdp_reduces_across_replicas_at_the_end(rank: int, world: int, watch: Watch) -> list[float]:
    """Micro-batches are reduced within the shards; only the last is reduced between the replicas as well."""
    mesh = init_device_mesh(here(), (2, 2), mesh_dim_names=("replicate", "shard"))
    model = mlp()
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        for micro in range(3):
            model.set_requires_all_reduce(micro == 2)  # type: ignore[attr-defined]
            model.set_reshard_after_backward(micro == 2)  # type: ignore[attr-defined]
            x, y = batch(rank, 3 * step + micro)
            loss = mse(model(x), y)
            (loss / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert_replicas_equal([p.full_tensor() for p in model.parameters()])
    assert_learned(losses)
    return losses


@program()
def two_tasks_of_one_body_by_uneven_ranks(rank: int, world: int, watch: Watch) -> list[float]:
    """Rank 0 trains one head and rank 1 the other, on one body whose gradients are averaged by hand; heads are not."""
    body = mlp(12, 24, 12)
    torch.manual_seed(10 + rank)
    head = nn.Linear(12, 6)
    optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()], 5e-3)
    watch(nn.ModuleDict({"body": body, "head": head}), optimizer)
    losses = []
    for step in range(2 * STEPS):
        x, y = batch(rank, step)
        loss = mse(head(body(x)), y if rank else -y)
        loss.backward()
        average_gradients(body.parameters(), world)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert_replicas_equal(body.parameters())
    assert_learned(losses)
    return losses
