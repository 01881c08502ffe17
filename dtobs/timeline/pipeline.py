"""A pipeline's step as data: which rank computed which micro-batch of which stage, from when until when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dtobs.codec import DecodeError, decode
from dtobs.events import PIPELINE_COMPUTE, PipelineOp
from dtobs.recording.plan import Plan
from dtobs.recording.view import RunView


@dataclass(frozen=True, slots=True)
class Chunk:
    """One record: an operation on a micro-batch. Times in ns on the clock that all ranks of the step share."""

    op: PipelineOp
    stage: int
    micro_batch: int
    begin_ns: int
    end_ns: int
    chunk: int = 0
    peer: int = -1
    bytes: float = 0.0

    @property
    def duration_ns(self) -> int:
        """How long it took."""
        return self.end_ns - self.begin_ns

    @property
    def is_compute(self) -> bool:
        """Whether the rank was busy with it."""
        return self.op in PIPELINE_COMPUTE


@dataclass(frozen=True)
class PipelineStep:
    """One step of one pipeline. `chunks` by global rank, each in the order in which they began."""

    step: int
    plan: Plan
    chunks: dict[int, tuple[Chunk, ...]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether every rank recorded every micro-batch of each of its stages, with all that belongs to it."""
        whole = self.plan.micro_batches * self.plan.virtual_stages
        seen = [Counter(c.op for c in self.chunks.get(r, ())) for r in self.plan.ranks]
        forwards = {count[PipelineOp.FORWARD] for count in seen}
        backwards = {count[PipelineOp.BACKWARD] + count[PipelineOp.BACKWARD_INPUT] for count in seen}
        split = all(c[PipelineOp.BACKWARD_INPUT] == c[PipelineOp.BACKWARD_WEIGHT] for c in seen)
        # Several calls of the schedule in one step make several times as many.
        return split and len(forwards) == 1 and forwards == backwards and all(f and f % whole == 0 for f in forwards)

    def compute(self) -> dict[int, tuple[Chunk, ...]]:
        """The computations alone, by rank in the pipeline's order."""
        return {r: tuple(c for c in self.chunks.get(r, ()) if c.is_compute) for r in self.plan.ranks}


def pipelines(view: RunView) -> list[Plan]:
    """Each pipeline of the run once, as its first rank saw it, in the order of the ranks."""
    found: dict[tuple[int, ...], Plan] = {}
    for rank in view.ranks:
        said = view.meta(rank).pipeline
        if not said:
            continue
        with suppress(DecodeError):  # it says something else
            plan = decode(Plan, said)
            found.setdefault(plan.ranks, plan)
    return list(found.values())


def read_steps(view: RunView, plan: Plan, last: int = 1) -> list[PipelineStep]:
    """The newest `last` steps that every rank of the pipeline has whole, oldest first."""
    # Forward, backward, weights, loss, two messages and a wait for each, of every stage and micro-batch.
    records_a_step = 12 * plan.micro_batches * plan.virtual_stages
    by_rank: dict[int, dict[int, tuple[Chunk, ...]]] = {}
    for rank in plan.ranks:
        if rank not in view.ranks:
            return []
        records = view.pipeline(rank, (last + 2) * records_a_step)
        by_rank[rank] = dict(_by_step(records))
    common = sorted(set.intersection(*(set(steps) for steps in by_rank.values())))
    steps = [PipelineStep(s, plan, {r: by_rank[r][s] for r in plan.ranks}) for s in common]
    return [step for step in steps if step.complete][-last:]


def chunks_by_step(view: RunView, rank: int) -> dict[int, tuple[Chunk, ...]]:
    """All that `rank` has recorded, also of steps that are not whole."""
    return dict(_by_step(view.pipeline(rank)))


def _by_step(records: npt.NDArray[np.void]) -> Iterator[tuple[int, tuple[Chunk, ...]]]:
    known = records[np.isin(records["op"], [int(op) for op in PipelineOp])]
    for step in np.unique(known["step"]).tolist():
        rows = known[known["step"] == step]
        rows = rows[np.argsort(rows["begin_ns"], kind="stable")]
        yield step, tuple(_chunk(row) for row in rows)


def _chunk(row: np.void) -> Chunk:
    return Chunk(
        PipelineOp(int(row["op"])),
        int(row["stage"]),
        int(row["micro_batch"]),
        int(row["begin_ns"]),
        int(row["end_ns"]),
        int(row["chunk"]),
        int(row["peer"]),
        float(row["bytes"]),
    )
