"""Where samples come from: samplers, workers, streams, uneven ends, a curriculum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from tests.plain.kit import STEPS, Watch, assert_learned, assert_replicas_equal, batch, mlp, mse, program


def dataset(rows: int = 160) -> TensorDataset:
    return TensorDataset(*batch(0, 0, rows=rows))


def epoch(model: Any, optimizer: Any, loader: Any) -> list[float]:
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@program()
def sampler_with_epochs(rank: int, world: int, watch: Watch) -> list[float]:
    model = DDP(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    data = dataset()
    sampler: DistributedSampler[Any] = DistributedSampler(data, world, rank, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    losses = []
    for number in range(3):
        sampler.set_epoch(number)
        losses += epoch(model, optimizer, loader)
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def sampler_of_one_epoch(rank: int, world: int, watch: Watch) -> list[float]:
    """One pass over the data needs no set_epoch."""
    model = DDP(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    data = dataset(400)
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, world, rank, shuffle=True))
    losses = epoch(model, optimizer, loader)
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def loader_with_workers(rank: int, world: int, watch: Watch) -> list[float]:
    model = DDP(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    data = dataset(240)
    sampler: DistributedSampler[Any] = DistributedSampler(data, world, rank, shuffle=False)
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=1, multiprocessing_context="fork")
    losses = epoch(model, optimizer, loader) + epoch(model, optimizer, loader)
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Every rank's own part of an endless stream."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number in range(self.rank, STEPS * 8 * self.world, self.world):
            x, y = batch(0, number, rows=1)
            yield x[0], y[0]


@program()
def stream(rank: int, world: int, watch: Watch) -> list[float]:
    model = DDP(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = epoch(model, optimizer, DataLoader(Stream(rank, world), batch_size=8))
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def uneven_inputs_and_zero(rank: int, world: int, watch: Watch) -> list[float]:
    """Join over DDP and ZeroRedundancyOptimizer together."""
    model = DDP(mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    watch(model, optimizer)
    with Join([model, optimizer]):
        losses = epoch(model, optimizer, [batch(rank, step) for step in range(STEPS + 3 * (1 - rank))])
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def stops_together_at_the_shortest(rank: int, world: int, watch: Watch) -> list[float]:
    """Before each step the ranks ask each other whether everybody still has data."""
    model = DDP(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = []
    for step in range(1000):
        more = torch.tensor(int(step < STEPS + 5 * rank))
        dist.all_reduce(more, op=dist.ReduceOp.MIN)
        if not more:
            break
        losses += epoch(model, optimizer, [batch(rank, step)])
    assert len(losses) == STEPS
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def curriculum(rank: int, world: int, watch: Watch) -> list[float]:
    """Batches grow, and sequences with them."""
    model = DDP(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = epoch(model, optimizer, [batch(rank, step, rows=4 + 4 * (step // 8)) for step in range(STEPS)])
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def padded_sequences(rank: int, world: int, watch: Watch) -> list[float]:
    """Lengths differ by rank and step, so shapes do."""
    torch.manual_seed(0)
    model = DDP(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = epoch(model, optimizer, [batch(rank, step, rows=5 + (3 * step + 4 * rank) % 11) for step in range(STEPS)])
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def broadcast_batches(rank: int, world: int, watch: Watch) -> list[float]:
    """Rank 0 reads for everybody and scatters."""
    model = DDP(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = torch.empty(8, 12), torch.empty(8, 6)
        whole_x, whole_y = batch(0, step, rows=8 * world)
        dist.scatter(x, list(whole_x.chunk(world)) if rank == 0 else None, src=0)
        dist.scatter(y, list(whole_y.chunk(world)) if rank == 0 else None, src=0)
        losses += epoch(model, optimizer, [(x, y)])
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses
