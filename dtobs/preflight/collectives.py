"""Whether collectives return the right values, and how fast a large one is.

Contributions are small whole numbers, so that every sum is exact in every type, bfloat16 (up to 256) included:
whatever differs by one is an error and no rounding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from dtobs.preflight.model import Speed, Wrong

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8)
SIZES = (1, 1021, 65_536)
"""Elements a rank contributes: the least there is, an odd number, and one that takes several packets."""
_CONTRIBUTORS = 60
_PROBE_BYTES = 1 << 20
_MOST_BYTES = 64 << 20
_SPEED_SECONDS = 0.2
_SPEED_REPEATS = 3
_MOST_PAIRS = 16

Group = dist.ProcessGroup | None


def contribution(rank: int, world: int, elements: int) -> torch.Tensor:
    """int64[elements] in 0 … 4. Each element gets at most 60 contributions that are not 0: sums stay below 241."""
    index = torch.arange(elements)
    values = (index * 7 + rank * 3 + index // 5) % 5
    if world > _CONTRIBUTORS:
        values[(index + rank) % world >= _CONTRIBUTORS] = 0
    return values


@dataclass(frozen=True)
class Case:
    """One collective to check: `rank` of `world`, each contributing `elements` of `dtype`."""

    rank: int
    world: int
    elements: int
    dtype: torch.dtype
    device: torch.device
    group: Group
    members: tuple[int, ...]  #: global ranks of the group

    def give(self, rank: int, elements: int = 0) -> torch.Tensor:
        """What `rank` contributes, as it goes into the collective."""
        return contribution(rank, self.world, elements or self.elements).to(self.device, self.dtype)

    def everybody(self, elements: int = 0) -> Iterator[torch.Tensor]:
        """The contributions of all ranks, in order, as int64 on the CPU."""
        return (contribution(rank, self.world, elements or self.elements) for rank in range(self.world))


Check = Callable[[Case], tuple[torch.Tensor, torch.Tensor, bool]]
"""Runs a collective; returns (got, expected as int64, whether each rank's part lies apart, in rank order)."""


def _sum(case: Case) -> tuple[torch.Tensor, torch.Tensor, bool]:
    got = case.give(case.rank)
    dist.all_reduce(got, group=case.group)
    expected = torch.zeros(case.elements, dtype=torch.int64)
    for part in case.everybody():
        expected += part
    return got, expected, False


def _max(case: Case) -> tuple[torch.Tensor, torch.Tensor, bool]:
    got = case.give(case.rank)
    dist.all_reduce(got, op=dist.ReduceOp.MAX, group=case.group)
    expected = torch.zeros(case.elements, dtype=torch.int64)
    for part in case.everybody():
        expected = torch.maximum(expected, part)
    return got, expected, False


def _gather(case: Case) -> tuple[torch.Tensor, torch.Tensor, bool]:
    got = torch.zeros(case.world * case.elements, dtype=case.dtype, device=case.device)
    dist.all_gather_into_tensor(got, case.give(case.rank), group=case.group)
    return got, torch.cat(list(case.everybody())), True


def _scatter(case: Case) -> tuple[torch.Tensor, torch.Tensor, bool]:
    whole = case.world * case.elements
    got = torch.zeros(case.elements, dtype=case.dtype, device=case.device)
    dist.reduce_scatter_tensor(got, case.give(case.rank, whole), group=case.group)
    own = slice(case.rank * case.elements, (case.rank + 1) * case.elements)
    expected = torch.zeros(case.elements, dtype=torch.int64)
    for part in case.everybody(whole):
        expected += part[own]
    return got, expected, False


def _exchange(case: Case) -> tuple[torch.Tensor, torch.Tensor, bool]:
    whole = case.world * case.elements
    got = torch.zeros(whole, dtype=case.dtype, device=case.device)
    dist.all_to_all_single(got, case.give(case.rank, whole), group=case.group)
    own = slice(case.rank * case.elements, (case.rank + 1) * case.elements)
    return got, torch.cat([part[own] for part in case.everybody(whole)]), True


def _broadcast(case: Case) -> tuple[torch.Tensor, torch.Tensor, bool]:
    root = case.elements % case.world  # another one with each size
    got = case.give(case.rank)
    dist.broadcast(got, case.members[root], group=case.group)
    return got, contribution(root, case.world, case.elements), False


CHECKS: dict[str, Check] = {
    "all_reduce": _sum,
    "all_reduce_max": _max,
    "all_gather": _gather,
    "reduce_scatter": _scatter,
    "all_to_all": _exchange,
    "broadcast": _broadcast,
}


def check(
    members: Sequence[int], own: int, device: torch.device, say: Callable[[str], None], group: Group = None
) -> tuple[int, list[Wrong]]:
    """Run every operation in every type and size; returns how many results were compared, and the wrong ones."""
    world, place = len(members), list(members).index(own)
    part = tuple(members) if group is not None else ()
    wrong, compared = [], 0
    for name, run in CHECKS.items():
        say(f"values: {name}")
        for elements in SIZES:
            size = max(1, min(elements, (1 << 22) // world))
            for dtype in DTYPES:
                case = Case(place, world, size, dtype, device, group, tuple(members))
                got, expected, apart = run(case)
                compared += 1
                bad = (got.cpu().to(torch.float64) != expected.to(torch.float64)).nonzero().flatten()
                if len(bad):
                    sources = _sources(name, bad, case, apart=apart)
                    text = str(dtype).removeprefix("torch.")
                    wrong.append(Wrong(own, name, text, size, len(bad), sources, part))
    return compared, wrong


def _sources(name: str, bad: torch.Tensor, case: Case, *, apart: bool) -> tuple[int, ...]:
    """Global ranks whose part of the result is wrong, where a part is one rank's."""
    if name == "broadcast":
        return (case.members[case.elements % case.world],)
    if not apart:
        return ()
    return tuple(case.members[place] for place in sorted(set((bad // case.elements).tolist())))


def pairs_to_check(members: Sequence[int]) -> list[tuple[int, int]]:
    """Groups of two in which a rank that contributes wrong values shows: a ring of all, one pair at a time."""
    if len(members) < 3 or len(members) > _MOST_PAIRS:
        return []
    return [*pairwise(members), (members[0], members[-1])]


def check_pairs(
    pairs: Sequence[tuple[int, int]], own: int, device: torch.device, say: Callable[[str], None]
) -> list[Wrong]:
    """The sum again in groups of two; every rank has to call this, as making a group takes everybody."""
    wrong = []
    for pair in pairs:
        group = dist.new_group(pair)
        if own in pair:
            say(f"values: all_reduce of ranks {pair[0]} and {pair[1]}")
            case = Case(pair.index(own), 2, SIZES[1], torch.float32, device, group, pair)
            got, expected, _ = _sum(case)
            bad = int((got.cpu().to(torch.int64) != expected).sum())
            if bad:
                wrong.append(Wrong(own, "all_reduce", "float32", SIZES[1], bad, (), pair))
    return wrong


def speeds(world: int, device: torch.device, say: Callable[[str], None]) -> list[Speed]:
    """All-reduce and all-gather of up to 64 MiB; bus bandwidth as nccl-tests defines it.

    That is S/t times 2(n−1)/n for an all-reduce and (n−1)/n for an all-gather of S bytes in all.
    """
    first = _timed(_all_reduce, _PROBE_BYTES, world, device)
    wanted = torch.tensor([_PROBE_BYTES * _SPEED_SECONDS / first], dtype=torch.float64, device=device)
    dist.all_reduce(wanted, op=dist.ReduceOp.MIN)  # one size for all ranks
    size = int(min(_MOST_BYTES, max(_PROBE_BYTES, float(wanted))))
    found = []
    for name, run, factor in (
        ("all_reduce", _all_reduce, 2 * (world - 1) / world),
        ("all_gather", _all_gather, (world - 1) / world),
    ):
        say(f"speed: {name}")
        best = min(_timed(run, size, world, device) for _ in range(_SPEED_REPEATS))
        found.append(Speed(name, size, best, size / best * factor))
    return found


def _timed(run: Callable[[torch.Tensor, int], object], size: int, world: int, device: torch.device) -> float:
    """Seconds of one collective, from the moment that everybody is there."""
    data = torch.ones(max(1, size // 4 // world) * world, device=device)
    dist.barrier()
    begin = time.perf_counter()
    run(data, world)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def _all_reduce(data: torch.Tensor, world: int) -> None:
    dist.all_reduce(data)


def _all_gather(data: torch.Tensor, world: int) -> None:
    dist.all_gather_into_tensor(data, torch.ones(len(data) // world, device=data.device))
