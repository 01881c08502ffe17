"""Models of which not every part is trained alike: frozen, tied, adapted, unfrozen later, recomputed, compiled."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from tests.plain.kit import STEPS, Watch, assert_learned, assert_replicas_equal, batch, mlp, mse, program, seeded, train


class Lora(nn.Module):
    """A frozen layer and a small product beside it that begins as nothing."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, layer.in_features) / 4)
        self.up = nn.Parameter(torch.zeros(layer.out_features, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + x @ self.down.T @ self.up.T


@program()
def lora(rank: int, world: int, watch: Watch) -> list[float]:
    base = mlp()
    model = DDP(nn.Sequential(*(Lora(part) if isinstance(part, nn.Linear) else part for part in base)))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 3e-2)
    watch(model, optimizer)
    return train(model, optimizer, rank)


@program()
def unfreezes_later(rank: int, world: int, watch: Watch) -> list[float]:
    """The head first, then everything, wrapped anew."""
    inner = mlp()
    for parameter in list(inner.parameters())[:-2]:
        parameter.requires_grad_(False)
    model = DDP(inner)
    optimizer = torch.optim.SGD([p for p in inner.parameters() if p.requires_grad], 0.1)
    watch(model, optimizer)
    losses = []
    for step in range(2 * STEPS):
        if step == STEPS:
            inner.requires_grad_(True)
            model = DDP(inner)
            optimizer = torch.optim.SGD(inner.parameters(), 0.1)
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(inner.parameters())
    return losses


class Tied(nn.Module):
    """A small language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(40, 16)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(words)))


@program()
def tied_weights(rank: int, world: int, watch: Watch) -> list[float]:
    model = DDP(Tied())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        words = torch.randint(40, (8, 6), generator=seeded(100 * step + rank))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(words).flatten(0, 1), ((words + 1) % 40).flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


class Recomputed(nn.Module):
    """Activations of the middle are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = mlp(outputs=24), mlp(inputs=24, outputs=24, seed=1), nn.Linear(24, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self.middle, self.first(x), use_reentrant=False))


@program()
def recomputes_activations(rank: int, world: int, watch: Watch) -> list[float]:
    model = DDP(Recomputed())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    return train(model, optimizer, rank)


@program()
def recurrent(rank: int, world: int, watch: Watch) -> list[float]:
    """An LSTM whose state goes on from batch to batch, detached."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"cell": nn.LSTM(12, 16, batch_first=True), "head": nn.Linear(16, 6)})
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses, state = [], None
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        out, state = model["cell"](x[None], state)
        state = tuple(part.detach() for part in state)
        loss = mse(model["head"](out[0]), y)
        loss.backward()
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad, op=torch.distributed.ReduceOp.SUM)
            parameter.grad /= world
        optimizer.step()
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def compiled(rank: int, world: int, watch: Watch) -> list[float]:
    """torch.compile with the backend that needs no compiler."""
    model = DDP(torch.compile(mlp(), backend="aot_eager"))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    return train(model, optimizer, rank)


@program()
def dropout_of_each_rank(rank: int, world: int, watch: Watch) -> list[float]:
    model = DDP(nn.Sequential(mlp(outputs=24), nn.Dropout(0.3), nn.Linear(24, 6)))
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    return train(model, optimizer, rank)


@program()
def a_temperature_beside_ddp(rank: int, world: int, watch: Watch) -> list[float]:
    """DDP knows nothing of it, so its gradient is averaged by hand; prompts of its own has each rank."""
    model, temperature = DDP(mlp(inputs=16)), nn.Parameter(torch.zeros(()))
    prompts = nn.Parameter(torch.randn(1, 4, generator=seeded(rank)))
    optimizer = torch.optim.AdamW([*model.parameters(), temperature, prompts], 1e-2)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = mse(temperature.exp() * model(torch.cat([x, prompts.expand(len(x), 4)], 1)), y)
        loss.backward()
        torch.distributed.all_reduce(temperature.grad)
        temperature.grad /= world  # type: ignore[operator]
        optimizer.step()
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal([*model.parameters(), temperature])
    return losses
