"""What would make a pipeline idle less, and what memory that costs: the measured computations, simulated otherwise."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dtobs.timeline.bubble import ideal
from dtobs.timeline.pipeline import Chunk, PipelineStep
from dtobs.timeline.replay import replay_chunks

LEAST_GAIN = 0.03
_ALL_IN_FLIGHT = ("ScheduleGPipe", "ScheduleLoopedBFS")


@dataclass(frozen=True)
class PipelineChange:
    """One change, the idle share before and after it, and what it costs."""

    change: str
    before: float
    after: float
    memory: str

    def line(self) -> str:
        """``8 micro-batches of half the size instead of 4: idle 27% → 16%; …``."""
        return f"{self.change}: idle {self.before:.0%} → {self.after:.0%}; {self.memory}"


def advise(step: PipelineStep) -> list[PipelineChange]:
    """What is worth doing, the most useful first; without the cost of communication, which changes with neither."""
    found = [one for one in (_more_micro_batches(step), _equal_stages(step)) if one is not None]
    return sorted((a for a in found if a.before - a.after >= LEAST_GAIN), key=lambda a: a.after - a.before)


def _more_micro_batches(step: PipelineStep) -> PipelineChange | None:
    plan = step.plan
    more = replace(plan, micro_batches=2 * plan.micro_batches)
    now, then = ideal(plan), ideal(more)
    if now is None or then is None:
        return None
    memory = "no more memory: as many samples are in flight at most"
    if plan.schedule not in _ALL_IN_FLIGHT:
        memory = "less memory: as many micro-batches are in flight, each of half the size"
    change = f"{more.micro_batches} micro-batches of half the size instead of {plan.micro_batches}"
    return PipelineChange(change, now, then, memory)


def _equal_stages(step: PipelineStep) -> PipelineChange | None:
    """Each stage's computations as long as those of the mean stage, in the same order."""
    compute = step.compute()
    total: dict[int, int] = {}
    for chunks in compute.values():
        for c in chunks:
            total[c.stage] = total.get(c.stage, 0) + c.duration_ns
    if len(total) < 2 or min(total.values()) <= 0:
        return None
    mean = sum(total.values()) / len(total)
    evened = {rank: tuple(_scaled(c, mean / total[c.stage]) for c in chunks) for rank, chunks in compute.items()}
    now, then = replay_chunks(compute, step.plan.stage_count), replay_chunks(evened, step.plan.stage_count)
    if now is None or then is None:
        return None
    longest = max(total, key=lambda stage: (total[stage], -stage))
    share = 1 - mean / total[longest]
    change = f"stages of equal length ({share:.0%} of what stage {longest} computes goes to the others)"
    return PipelineChange(change, now.bubble, then.bubble, "its parameters and activations move with it")


def _scaled(chunk: Chunk, by: float) -> Chunk:
    return replace(chunk, end_ns=chunk.begin_ns + round(chunk.duration_ns * by))
