"""What the measured computations would have taken with communication that costs nothing: a discrete-event replay.

Every rank does its computations in the order in which it did them, each as soon as the rank is free and what it needs
is there. What idle time remains belongs to the schedule and to uneven stages; what the run had beyond it was
communication and waiting for late ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dtobs.events import PipelineOp
from dtobs.timeline.pipeline import Chunk, PipelineStep

_BACKWARD = (PipelineOp.BACKWARD, PipelineOp.BACKWARD_INPUT)
Key = tuple[str, int, int]
"""What a computation makes: "F" or "B", the stage, the micro-batch."""


@dataclass(frozen=True)
class Replay:
    """`starts_ns` by rank, of its computations in their order; the step begins at 0 and ends at `makespan_ns`."""

    makespan_ns: int
    bubble: float  #: idle share of ranks × makespan
    starts_ns: dict[int, tuple[int, ...]]


def replay(step: PipelineStep) -> Replay | None:
    """Replay a step; None when its records do not fit together (a computation whose input nobody made)."""
    return replay_chunks(step.compute(), step.plan.stage_count)


def replay_chunks(chunks: Mapping[int, Sequence[Chunk]], stage_count: int) -> Replay | None:
    """The same of computations by rank, each rank's in its order."""
    done: dict[Key, int] = {}
    starts: dict[int, list[int]] = {rank: [] for rank in chunks}
    free = dict.fromkeys(chunks, 0)
    waiting = deque(rank for rank in chunks if chunks[rank])
    stuck = 0
    while waiting:
        rank = waiting.popleft()
        before = len(starts[rank])
        while len(starts[rank]) < len(chunks[rank]):
            chunk = chunks[rank][len(starts[rank])]
            needs = _needs(chunk, stage_count)
            if any(key not in done for key in needs):
                break
            begin = max([free[rank], *(done[key] for key in needs)])
            free[rank] = begin + chunk.duration_ns
            starts[rank].append(begin)
            if (made := _makes(chunk)) is not None:
                done[made] = free[rank]
        stuck = 0 if len(starts[rank]) > before else stuck + 1
        if len(starts[rank]) < len(chunks[rank]):
            waiting.append(rank)
        if waiting and stuck > len(waiting):
            return None
    makespan = max(free.values(), default=0)
    if not makespan:
        return None
    busy = sum(c.duration_ns for row in chunks.values() for c in row)
    return Replay(makespan, 1 - busy / (len(chunks) * makespan), {rank: tuple(row) for rank, row in starts.items()})


def _makes(chunk: Chunk) -> Key | None:
    if chunk.op == PipelineOp.FORWARD:
        return ("F", chunk.stage, chunk.micro_batch)
    return ("B", chunk.stage, chunk.micro_batch) if chunk.op in _BACKWARD else None


def _needs(chunk: Chunk, stage_count: int) -> list[Key]:
    """What another rank must have made. What this rank itself makes first is in the order already."""
    if chunk.op == PipelineOp.FORWARD and chunk.stage > 0:
        return [("F", chunk.stage - 1, chunk.micro_batch)]
    if chunk.op in _BACKWARD and chunk.stage < stage_count - 1:
        return [("B", chunk.stage + 1, chunk.micro_batch)]
    return []
