"""Ways to step: closures, own classes, no optimizer at all, inside the backward pass, averages, schedules."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import SWALR, AveragedModel

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
    train,
)


@program()
def lbfgs(rank: int, world: int, watch: Watch) -> list[float]:
    """The optimizer calls a closure several times a step; loss and gradients are averaged so that ranks agree."""
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    watch(model, optimizer)
    losses = []
    x, y = batch(rank, 0, rows=16)
    for _ in range(10):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = mse(model(x), y)
            loss.backward()
            average_gradients(model.parameters(), world)
            shared = loss.detach().clone()
            torch.distributed.all_reduce(shared)
            return shared / world

        losses.append(float(optimizer.step(closure)))
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


class Lion(torch.optim.Optimizer):
    """An optimizer that somebody wrote."""

    def __init__(self, parameters: Iterable[Any], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                parameter.add_(torch.sign(0.9 * average + 0.1 * parameter.grad), alpha=-group["lr"])
                average.lerp_(parameter.grad, 0.01)


@program()
def own_optimizer(rank: int, world: int, watch: Watch) -> list[float]:
    model = DDP(mlp())
    optimizer = Lion(model.parameters(), 3e-3)
    watch(model, optimizer)
    return train(model, optimizer, rank)


@program()
def sgd_by_hand(rank: int, world: int, watch: Watch) -> list[float]:
    """No optimizer, no wrapper."""
    model = mlp()
    watch(model)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = mse(model(x), y)
        model.zero_grad()
        loss.backward()
        average_gradients(model.parameters(), world)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def steps_in_the_backward(rank: int, world: int, watch: Watch) -> list[float]:
    """Each parameter is stepped as soon as its gradient is there, and the gradient freed."""
    model = mlp()
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def step_now(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= world
        optimizers[parameter].step()  # type: ignore[index]
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)
    watch(model, list(optimizers.values()))
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = mse(model(x), y)
        loss.backward()
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def ema_is_swapped_in(rank: int, world: int, watch: Watch) -> list[float]:
    """The averaged weights take the model's place during evaluation."""
    model = DDP(mlp())
    average = AveragedModel(model.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        average.update_parameters(model.module)
        losses.append(loss.item())
        if step % 8 == 7:
            kept = copy.deepcopy(model.module.state_dict())
            model.module.load_state_dict(average.module.state_dict())
            model.eval()
            with torch.no_grad():
                assert torch.isfinite(mse(model(x), y))
            model.train()
            model.module.load_state_dict(kept)
    assert_learned(losses)
    assert_replicas_equal([*model.parameters(), *average.module.parameters()])
    return losses


@program()
def stochastic_weight_averaging(rank: int, world: int, watch: Watch) -> list[float]:
    model = DDP(mlp())
    average = AveragedModel(model.module)
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    schedule = SWALR(optimizer, swa_lr=0.05, anneal_epochs=4)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        if step >= STEPS // 2:
            average.update_parameters(model.module)
            schedule.step()
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal([*model.parameters(), *average.module.parameters()])
    return losses


@program()
def schedules(rank: int, world: int, watch: Watch) -> list[float]:
    """Warm-up from nothing, then a cosine with restarts."""
    model = DDP(mlp())
    optimizer = torch.optim.AdamW(
        [{"params": list(model.parameters())[:2], "lr": 2e-2}, {"params": list(model.parameters())[2:]}], 1e-2
    )
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 1.0, 5)
    cosine = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 8)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [5])
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def sparse_embeddings(rank: int, world: int, watch: Watch) -> list[float]:
    """Sparse gradients, gathered as such."""
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Embedding(50, 12, sparse=True), nn.Flatten(), nn.Linear(36, 6)))
    table, rest = list(model.parameters())[:1], list(model.parameters())[1:]
    optimizers = [torch.optim.SparseAdam(table, 1e-2), torch.optim.Adam(rest, 1e-2)]
    watch(model, optimizers)
    losses = []
    for step in range(STEPS):
        words = torch.randint(50, (8, 3), generator=seeded(100 * step + rank))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = mse(model(words), torch.ones(8, 6))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


class Container(torch.optim.Optimizer):
    """One optimizer for matrices and one for the rest, called as if they were one; schedules are theirs."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        matrices, rest = ([p for p in parameters if (p.dim() > 1) is wanted] for wanted in (True, False))
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(matrices, 1e-2), torch.optim.SGD(rest, 5e-2)]
        super().__init__(parameters, {"lr": 1.0})

    def step(self, closure: Any = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


@program()
def optimizers_in_a_container(rank: int, world: int, watch: Watch) -> list[float]:
    """As torchtitan has one for each part of the model; what the container says of the learning rate is never used."""
    model = DDP(mlp())
    optimizer = Container(list(model.parameters()))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.95) for each in optimizer.optimizers]
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        for schedule in schedules:
            schedule.step()
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def adafactor_and_a_plateau(rank: int, world: int, watch: Watch) -> list[float]:
    """Two eps in one option, factored moments, and a rate that falls by a loss that all ranks share."""
    model = DDP(mlp())
    optimizer = torch.optim.Adafactor(model.parameters(), lr=3e-2)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=1)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        shared = loss.detach().clone()
        torch.distributed.all_reduce(shared)
        schedule.step(shared.item() / world)
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


class Shampoo(torch.optim.Optimizer):
    """Preconditioners of which each rank computes a share, and sends what it found."""

    def __init__(self, parameters: Iterable[Any], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self._done = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        for group in self.param_groups:
            matrices = [p for p in group["params"] if p.dim() == 2]
            for place, p in enumerate(matrices):
                state = self.state[p]
                state.setdefault("sum", torch.eye(len(p)) * 1e-3).add_(p.grad @ p.grad.T)
                root = state.setdefault("root", torch.eye(len(p)))
                if self._done % 4 == 0:
                    if place % world == rank:
                        values, vectors = torch.linalg.eigh(state["sum"])
                        root.copy_(vectors @ torch.diag(values.clamp(min=1e-6) ** -0.5) @ vectors.T)
                    torch.distributed.broadcast(root, place % world)
                p.add_(root @ p.grad, alpha=-group["lr"])
            for p in group["params"]:
                if p.dim() != 2:
                    p.add_(p.grad, alpha=-group["lr"])
        self._done += 1


@program()
def shampoo_shared_out(rank: int, world: int, watch: Watch) -> list[float]:
    """What ranks keep of a preconditioner differs between its owner and the rest; what comes of it does not."""
    model = DDP(mlp())
    optimizer = Shampoo(model.parameters(), lr=5e-2)
    watch(model, optimizer)
    return train(model, optimizer, rank)


@program()
def complex_weights_in_double_precision(rank: int, world: int, watch: Watch) -> list[float]:
    """A filter of frequencies: complex parameters, averaged by hand as pairs of real numbers."""
    torch.manual_seed(0)
    weights = nn.ParameterDict(
        {"filter": torch.randn(7, dtype=torch.complex128) * 0.1, "out": torch.randn(12, 6, dtype=torch.float64) * 0.1}
    )
    optimizer = torch.optim.Adam(weights.parameters(), lr=2e-2)
    watch(weights, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        hidden = torch.fft.irfft(torch.fft.rfft(x.double()) * weights["filter"], n=12)
        optimizer.zero_grad()
        loss = mse(hidden @ weights["out"], y.double())
        loss.backward()
        for p in weights.values():
            parts = torch.view_as_real(p.grad) if p.is_complex() else p.grad
            torch.distributed.all_reduce(parts)
            parts /= world
        optimizer.step()
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(weights.parameters())
    return losses
