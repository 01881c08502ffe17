"""The 3-D job that synthetic dumps are made of: its groups, and the calls of one step on each pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

WORLD, TENSOR, DATA, PIPE = "world", "tp", "dp", "pp"
_BUCKETS = ((4096, 1024), (4096, 4096), (1024, 4096), (512, 1024))
_HIDDEN = (2048, 1024)


@dataclass(frozen=True)
class ModelCall:
    """One call of a step. `peer_offset`: for a send or a receive, the other side's distance in the group."""

    axis: str
    operation: str
    size: tuple[int, ...]
    site: str
    dtype: str = "BFloat16"
    peer_offset: int = 0


@dataclass(frozen=True)
class Step:
    """The calls of one step on one pipeline stage, in order."""

    calls: tuple[ModelCall, ...]


@dataclass(frozen=True)
class JobLayout:
    """Ranks = dp × pp × tp, tensor parallel innermost, as most trainers lay them out."""

    dp: int = 2
    tp: int = 2
    pp: int = 2
    layers: int = 2
    micro_batches: int = 2

    def __post_init__(self) -> None:
        if min(self.dp, self.tp, self.pp, self.layers, self.micro_batches) < 1:
            raise ValueError("every size of a layout is at least 1")

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The groups a rank belongs to; axes of size 1 have none."""
        sizes = ((WORLD, 2), (TENSOR, self.tp), (DATA, self.dp), (PIPE, self.pp))
        return tuple(axis for axis, size in sizes if size > 1)

    def stage(self, rank: int) -> int:
        """Pipeline stage of a rank."""
        return rank // self.tp % self.pp

    def members(self, rank: int, axis: str) -> list[int]:
        """Global ranks of the rank's group along `axis`, ascending."""
        if axis == WORLD:
            return self._world
        if axis == TENSOR:
            first = rank - rank % self.tp
            return list(range(first, first + self.tp))
        if axis == DATA:
            return list(range(rank % (self.tp * self.pp), self.world_size, self.tp * self.pp))
        replica = rank // (self.tp * self.pp) * self.tp * self.pp
        return list(range(replica + rank % self.tp, replica + self.tp * self.pp, self.tp))

    @cached_property
    def _world(self) -> list[int]:
        return list(range(self.world_size))

    def group_name(self, rank: int, axis: str) -> str:
        """PyTorch numbers groups in the order of their creation, the same on all ranks."""
        if axis == WORLD:
            return "0"
        number = 1
        for other in self.axes[1:]:
            if other == axis:
                break
            number += self._groups_along(other)
        inner, outer = rank % self.tp, rank // (self.tp * self.pp)
        within = {TENSOR: rank // self.tp, DATA: rank % (self.tp * self.pp), PIPE: outer * self.tp + inner}[axis]
        return str(number + within)

    def _groups_along(self, axis: str) -> int:
        return self.world_size // {TENSOR: self.tp, DATA: self.dp, PIPE: self.pp}[axis]

    def description(self, axis: str) -> str:
        """The group's ``group_desc``."""
        return "default_pg" if axis == WORLD else f"mesh_{axis}"


@lru_cache(maxsize=256)
def step_of(layout: JobLayout, stage: int) -> Step:
    """One step: forwards of all microbatches, backwards, gradient buckets, and the norm over all ranks."""
    calls: list[ModelCall] = []
    first, last = stage == 0, stage == layout.pp - 1
    for _ in range(layout.micro_batches):
        if not first:
            calls.append(ModelCall(PIPE, "recv", _HIDDEN, "pipeline.py:40:recv_forward", peer_offset=-1))
        if layout.tp > 1:
            for _ in range(layout.layers):
                calls.append(ModelCall(TENSOR, "all_reduce", _HIDDEN, "attention.py:88:forward"))
                calls.append(ModelCall(TENSOR, "all_reduce", _HIDDEN, "mlp.py:51:forward"))
        if not last:
            calls.append(ModelCall(PIPE, "send", _HIDDEN, "pipeline.py:55:send_forward", peer_offset=1))
    for _ in range(layout.micro_batches):
        if not last:
            calls.append(ModelCall(PIPE, "recv", _HIDDEN, "pipeline.py:70:recv_backward", peer_offset=1))
        if layout.tp > 1:
            for _ in range(layout.layers):
                calls.append(ModelCall(TENSOR, "all_reduce", _HIDDEN, "mlp.py:77:backward"))
                calls.append(ModelCall(TENSOR, "all_reduce", _HIDDEN, "attention.py:120:backward"))
        if not first:
            calls.append(ModelCall(PIPE, "send", _HIDDEN, "pipeline.py:85:send_backward", peer_offset=-1))
    if layout.dp > 1:
        for number, size in enumerate(_BUCKETS):
            calls.append(ModelCall(DATA, "all_reduce", size, f"buckets.py:{30 + number}:reduce", dtype="Float"))
    if layout.world_size > 1:
        calls.append(ModelCall(WORLD, "all_reduce", (1,), "clip.py:19:global_norm", dtype="Float"))
    return Step(tuple(calls))
