"""What would make a pipeline idle less, and what memory that costs: the measured computations, simulated otherwise."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from dtobs.recording.meta import Parameter
from dtobs.recording.plan import Plan
from dtobs.recording.view import RunView
from dtobs.timeline.bubble import ideal
from dtobs.timeline.pipeline import Chunk, PipelineStep
from dtobs.timeline.replay import replay_chunks

LEAST_GAIN = 0.03
_NUMBERED = re.compile(r"(?:^|\.)(\d{1,6})\.")
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


Layers = Mapping[int, int]
"""The layers of a stage: how many parameters each number has."""


def layers_of(view: RunView, plan: Plan) -> dict[int, Layers]:
    """By stage, its layers; empty where a rank has several stages, or where the names do not number the layers."""
    if plan.virtual_stages > 1 or not all(rank in view.ranks for rank in plan.ranks):
        return {}
    found = {stage: _numbered(view.meta(rank).params) for stage, rank in enumerate(plan.ranks)}
    numbers = [number for stage in found for number in sorted(found[stage])]
    return found if all(found.values()) and numbers == list(range(len(numbers))) else {}


def _numbered(table: Iterable[Parameter]) -> Layers:
    """The layers that the names of parameters number, as in ``model.layers.17.attention.wq.weight``.

    Of several lists of modules the one with the most parameters counts.
    """
    lists: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for parameter in table:
        if found := _NUMBERED.search(parameter.name):
            lists[parameter.name[: found.start(1)]][int(found[1])] += math.prod(parameter.shape)
    return max(lists.values(), key=lambda one: sum(one.values())) if lists else {}


def advise(step: PipelineStep, layers: Mapping[int, Layers] | None = None) -> list[PipelineChange]:
    """What is worth doing, the most useful first; without the cost of communication, which changes with neither.

    `layers`: of each stage, where they are known: then the move of one of them is told before what equal stages bring.
    """
    tried = (_more_micro_batches(step), _one_layer(step, layers) if layers else None, _equal_stages(step))
    found = [one for one in tried if one is not None and one.before - one.after >= LEAST_GAIN]
    return sorted(found, key=lambda one: one.after - one.before)


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
    compute, total = step.compute(), _computed(step)
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


def _one_layer(step: PipelineStep, layers: Mapping[int, Layers]) -> PipelineChange | None:
    """The layer whose move to a neighbouring stage shortens the pipeline most.

    A layer is taken to cost what the cheapest stage computes for each of its own: embedding and head come on top.
    """
    compute, total = step.compute(), _computed(step)
    if len(total) < 2 or set(total) != set(layers) or min(total.values()) <= 0:
        return None
    cost = min(total[stage] / len(layers[stage]) for stage in total)
    now = replay_chunks(compute, step.plan.stage_count)
    if now is None:
        return None
    best: tuple[float, int, int, float] | None = None
    for source in total:
        for target in {source - 1, source + 1} & total.keys():
            if len(layers[source]) < 2:
                continue
            by = {source: 1 - cost / total[source], target: 1 + cost / total[target]}
            moved = {rank: tuple(_scaled(c, by.get(c.stage, 1.0)) for c in chunks) for rank, chunks in compute.items()}
            then = replay_chunks(moved, step.plan.stage_count)
            if then is not None and (best is None or then.makespan_ns < best[0]):
                best = then.makespan_ns, source, target, then.bubble
    if best is None:
        return None
    span, source, target, idle = best
    number = min(layers[source]) if target < source else max(layers[source])
    way = "previous" if target < source else "next"
    change = f"layer {number} of stage {source} on the {way} stage ({1 - span / now.makespan_ns:.0%} less time)"
    return PipelineChange(change, now.bubble, idle, f"its {layers[source][number]:,} parameters move with it")


def _computed(step: PipelineStep) -> dict[int, int]:
    """By stage, how long it computes in a step, in ns."""
    total: dict[int, int] = {}
    for chunks in step.compute().values():
        for c in chunks:
            total[c.stage] = total.get(c.stage, 0) + c.duration_ns
    return total


def _scaled(chunk: Chunk, by: float) -> Chunk:
    return replace(chunk, end_ns=chunk.begin_ns + round(chunk.duration_ns * by))
