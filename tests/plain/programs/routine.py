"""What else a training does: checkpoints and resuming, evaluation, a second optimizer later on, silence."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.plain.kit import STEPS, Watch, assert_learned, assert_replicas_equal, batch, mlp, mse, program, seeded


def step_of(model: Any, optimizer: Any, rank: int, step: int) -> float:
    x, y = batch(rank, step)
    optimizer.zero_grad()
    loss = mse(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


@program()
def resumes_in_the_same_process(rank: int, world: int, watch: Watch) -> list[float]:
    """Trains on, goes back to the checkpoint, and does the same steps again with the same losses."""
    model = DDP(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = [step_of(model, optimizer, rank, step) for step in range(8)]
    kept = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, kept)
    first = [step_of(model, optimizer, rank, step) for step in range(8, 16)]
    kept.seek(0)
    saved = torch.load(kept)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    again = [step_of(model, optimizer, rank, step) for step in range(8, 16)]
    assert first == again
    losses += first + [step_of(model, optimizer, rank, step) for step in range(16, STEPS)]
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def rank_0_loads_for_all(rank: int, world: int, watch: Watch) -> list[float]:
    """Ranks begin differently; rank 0's weights are broadcast before the first step."""
    model = mlp(seed=rank)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    wrapped = DDP(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), 1e-2)
    watch(wrapped, optimizer)
    losses = [step_of(wrapped, optimizer, rank, step) for step in range(STEPS)]
    assert_learned(losses)
    assert_replicas_equal(wrapped.parameters())
    return losses


@program()
def evaluates_often(rank: int, world: int, watch: Watch) -> list[float]:
    model = DDP(nn.Sequential(mlp(outputs=24), nn.Dropout(0.1), nn.Linear(24, 6)))
    torch.manual_seed(100 + rank)  # each rank drops units of its own
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        losses.append(step_of(model, optimizer, rank, step))
        if step % 4 == 3:
            model.eval()
            with torch.no_grad():
                held_out = sum(mse(model.module(x), y) for x, y in (batch(50 + rank, n) for n in range(5)))
            dist.all_reduce(held_out)
            model.train()
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def second_model_in_mid_run(rank: int, world: int, watch: Watch) -> list[float]:
    """A first model is trained, then another on what it has learned, with an optimizer of its own."""
    first = DDP(mlp())
    optimizer = torch.optim.AdamW(first.parameters(), 1e-2)
    watch(first, optimizer)
    losses = [step_of(first, optimizer, rank, step) for step in range(STEPS)]
    assert_learned(losses)
    second = DDP(mlp(seed=4))
    optimizer = torch.optim.SGD(second.parameters(), 0.1)
    more = [step_of(second, optimizer, rank, step) for step in range(STEPS)]
    assert_learned(more)
    assert_replicas_equal([*first.parameters(), *second.parameters()])
    return losses + more


@program()
def says_nothing(rank: int, world: int, watch: Watch) -> list[float]:
    """The loss is never read during the training, only the sum at its end."""
    model = DDP(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    total = torch.zeros(())
    for step in range(3 * STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    assert_replicas_equal(model.parameters())
    return [total.item()]


@program()
def resets_weights_on_purpose(rank: int, world: int, watch: Watch) -> list[float]:
    """The last layer is begun anew half-way, alike on all ranks."""
    model = DDP(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = []
    for step in range(2 * STEPS):
        if step == STEPS:
            torch.manual_seed(9)
            model.module[-1].reset_parameters()
            optimizer.state.clear()
        losses.append(step_of(model, optimizer, rank, step))
    assert_learned(losses[:STEPS])
    assert_learned(losses[STEPS:])
    assert_replicas_equal(model.parameters())
    return losses


@program()
def prunes(rank: int, world: int, watch: Watch) -> list[float]:
    """Half of the weights of a layer are held at zero after each step."""
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    weight = model.module[0].weight
    mask = (torch.rand(weight.shape, generator=seeded(2)) > 0.5).float()
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        losses.append(step_of(model, optimizer, rank, step))
        with torch.no_grad():
            weight.mul_(mask)
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses
