"""What the ranks of `hook_soak` run: every kind of communication at once, in an order that a seed decides."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ROUNDS = 12
_THREADS = 2
_LIMIT = timedelta(minutes=5)

Operation = Callable[[Any, int], None]
"""One communication in a group of which this rank is a member; the number makes its tensors differ."""


def all_reduce(group: Any, n: int) -> None:
    """Sum of ones, waited for at once."""
    values = torch.ones(n % 7 + 1)
    dist.all_reduce(values, group=group)
    _equal(values, dist.get_world_size(group))


def all_reduce_later(group: Any, n: int) -> None:
    """Several in flight, waited for in the opposite order."""
    values = [torch.full((n % 5 + 1,), float(i)) for i in range(4)]
    works = [dist.all_reduce(v, group=group, async_op=True) for v in values]
    for work in reversed(works):
        assert work is not None
        work.wait()
    for i, v in enumerate(values):
        _equal(v, i * dist.get_world_size(group))


def gather_and_scatter(group: Any, n: int) -> None:
    """All-gather, then reduce-scatter what was gathered."""
    world = dist.get_world_size(group)
    gathered = torch.zeros(world * 4)
    dist.all_gather_into_tensor(gathered, torch.full((4,), float(dist.get_rank(group))), group=group)
    own = torch.zeros(4)
    dist.reduce_scatter_tensor(own, gathered, group=group)
    _equal(own, world * dist.get_rank(group))


def broadcast(group: Any, n: int) -> None:
    """From a member that the number chooses."""
    source = n % dist.get_world_size(group)
    values = torch.full((3,), float(dist.get_rank(group)))
    dist.broadcast(values, group_src=source, group=group)
    _equal(values, source)


def ring(group: Any, n: int) -> None:
    """To the next member and from the one before, both in flight."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    received = torch.zeros(2)
    send = dist.P2POp(dist.isend, torch.full((2,), float(rank)), group=group, group_peer=(rank + 1) % world)
    receive = dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % world)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    _equal(received, (rank - 1) % world)


def objects(group: Any, n: int) -> None:
    """Pickled objects: two collectives of sizes that only become known on the way."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, {"rank": dist.get_rank(group), "n": n}, group=group)
    assert [f["rank"] for f in found] == list(range(len(found)))


def barrier(group: Any, n: int) -> None:
    """Nothing but waiting."""
    dist.barrier(group=group)


OPERATIONS: tuple[Operation, ...] = (
    all_reduce,
    all_reduce_later,
    gather_and_scatter,
    broadcast,
    ring,
    objects,
    barrier,
)


def soak(rank: int, world: int, run_dir: Path, seed: int, hooked: bool) -> int:
    """One short job; returns how many collectives and messages the recording counted (0 without the hook)."""
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    groups = [dist.group.WORLD, dist.new_group(list(range(world)), timeout=_LIMIT)]
    half = dist.new_group(list(range(max(2, world // 2))), timeout=_LIMIT)
    own = [dist.new_group(list(range(world)), timeout=_LIMIT) for _ in range(_THREADS)]
    if half is not None and rank < max(2, world // 2):
        groups.append(half)
    session = None
    if hooked:
        import dtobs

        session = dtobs.attach(model, optimizer, run_dir=run_dir, monitor=False)
    failures: list[BaseException] = []
    threads = [
        threading.Thread(target=_guarded, args=(failures, _many, [group], seed + i), daemon=True)
        for i, group in enumerate(own)
    ]
    for thread in threads:
        thread.start()
    for n in range(ROUNDS):
        loss = model(torch.randn(4, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        _many(groups, seed * 1000 + n, count=4)
    for thread in threads:
        thread.join()
    dist.barrier()
    if failures:
        raise failures[0]
    counted = int(session._recorder.page.get("collectives")) if session is not None else 0  # type: ignore[attr-defined]
    if session is not None:
        session.close()
    return counted


def _many(groups: list[Any], seed: int, count: int = 24) -> None:
    """`count` operations; every member of a group draws the same ones for it, in the same order."""
    draws = random.Random(seed)
    for _ in range(count):
        which, operation, n = draws.randrange(2), draws.choice(OPERATIONS), draws.randrange(100)
        operation(groups[which % len(groups)], n)
    if len(groups) > 2:
        OPERATIONS[seed % len(OPERATIONS)](groups[2], seed % 100)


def _guarded(failures: list[BaseException], action: Callable[..., None], *args: Any) -> None:
    try:
        action(*args)
    except BaseException as error:  # raised again on the main thread
        failures.append(error)


def _equal(values: Tensor, expected: float) -> None:
    if not bool((values == expected).all()):
        raise AssertionError(f"got {values.tolist()}, expected {expected}")
