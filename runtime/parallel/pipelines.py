"""Pipeline parallelism: layers cut into stages, micro-batches sent through them by torch's schedules.

GPipe, 1F1B            one stage a rank
Interleaved1F1B        two stages a rank, r and r + p: smaller bubble, more messages
ZBV, DualPipeV         two stages a rank, r and 2p − 1 − r: the first rank has both ends, so the loss lives there;
                       backward is split into input and weight gradients to fill the bubble
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from runtime.model.transformer import Transformer

Loss = Callable[[Tensor, Tensor], Tensor]
_ONE_STAGE = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
_TWO_STAGES = {"Interleaved1F1B": ScheduleInterleaved1F1B, "ZBV": ScheduleZBVZeroBubble, "DualPipeV": ScheduleDualPipeV}


def stage_numbers(schedule: str, rank: int, ranks: int) -> list[int]:
    """The stages that the pipeline's rank `rank` of `ranks` holds, in order."""
    if schedule in _ONE_STAGE:
        return [rank]
    return [rank, rank + ranks] if schedule == "Interleaved1F1B" else [rank, 2 * ranks - 1 - rank]


def stage_count(schedule: str, ranks: int) -> int:
    """Stages of the whole pipeline."""
    return ranks if schedule in _ONE_STAGE else 2 * ranks


def stage_layers(layers: int, stages: int, stage: int) -> range:
    """The layers of one stage: as even as can be, earlier stages take one more where they do not divide."""
    small, extra = divmod(layers, stages)
    first = stage * small + min(stage, extra)
    return range(first, first + small + (1 if stage < extra else 0))


def take_stage(model: Transformer, stages: int, stage: int) -> None:
    """Take out of the whole `model` (on the meta device) everything that other stages hold."""
    kept = stage_layers(len(model.layers), stages, stage)
    for number in list(model.layers):
        if int(number) not in kept:
            del model.layers[number]
    if stage != 0:
        model.embedding = None
    if stage != stages - 1:
        model.norm = model.head = None


@dataclass
class Pipeline:
    """The stages of this rank and the schedule that runs them. `stages` are by number, in the order they compute."""

    schedule: Any  # torch's schedule classes share no public base
    group: dist.ProcessGroup
    stages: dict[int, nn.Module]
    rank_of_stage: list[int]  # in the group
    loss: Loss

    def forward_and_backward(self, inputs_NT: Tensor, targets_NT: Tensor) -> list[Tensor]:
        """Run all micro-batches of a step forward and backward; their losses, on the rank with the last stage only."""
        losses: list[Tensor] = []
        last = len(self.rank_of_stage) - 1
        self.schedule.step(
            *((inputs_NT,) if 0 in self.stages else ()),
            **({"target": targets_NT, "losses": losses} if last in self.stages else {}),
            return_outputs=False,
        )
        return losses

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor, activation: Tensor) -> Tensor | None:
        """One micro-batch forward only; its loss, on the rank with the last stage only.

        `activation` has the shape and format of what stages exchange. Not by torch's schedules: the V-shaped ones
        cannot run without a backward pass.
        """
        last = len(self.rank_of_stage) - 1
        x = inputs_BT
        for number, stage in self.stages.items():
            here = self.rank_of_stage[number]
            if number > 0 and self.rank_of_stage[number - 1] != here:
                x = torch.empty_like(activation)
                dist.recv(x, group=self.group, group_src=self.rank_of_stage[number - 1])
            x = stage(x)
            if number == last:
                return self.loss(x, targets_BT)
            if self.rank_of_stage[number + 1] != here:
                dist.send(x.contiguous(), group=self.group, group_dst=self.rank_of_stage[number + 1])
        return None


def build(
    parts: list[nn.Module],
    schedule: str,
    group: dist.ProcessGroup,
    device: torch.device,
    micro_batches: int,
    loss: Loss,
) -> Pipeline:
    """The pipeline of this rank's `parts`, in the order of `stage_numbers`. `loss` is of one micro-batch."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    numbers, count = stage_numbers(schedule, rank, ranks), stage_count(schedule, ranks)
    stages = [
        PipelineStage(part, number, count, device, group=group) for part, number in zip(parts, numbers, strict=True)
    ]
    made: Any
    if schedule in _ONE_STAGE:
        made = _ONE_STAGE[schedule](stages[0], micro_batches, loss_fn=loss, scale_grads=False)
    else:
        made = _TWO_STAGES[schedule](list(stages), micro_batches, loss_fn=loss, scale_grads=False)
    rank_of_stage = [0] * count
    for holder in range(ranks):
        for number in stage_numbers(schedule, holder, ranks):
            rank_of_stage[number] = holder
    return Pipeline(made, group, dict(zip(numbers, parts, strict=True)), rank_of_stage, loss)
