"""What is private to ``torch.distributed.pipelining``, in one place: a schedule's stages, and its messages.

Uses ``schedule._stage``/``_stages``, ``_n_microbatches``, ``_loss_fn``, ``_initialize_pp_stages`` (before torch 2.13
``_initialize_stage`` or ``_initialize_stages``) and the module functions ``_batch_p2p`` and ``_wait_batch_p2p``, which
all schedules call by those names (torch 2.6 has no such wait). Where a version lacks the two functions, computations
are still recorded, messages and waits are not (`has_messages` says so).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from dtobs.recording.plan import Plan

TRIED = ("2.6", "2.8", "2.10", "2.11", "2.13", "2.14", "2.15")
"""Versions of torch that this was tried with."""
BATCH, WAIT = "_batch_p2p", "_wait_batch_p2p"
LOSS = "_loss_fn"
DRY_RUN = ("_initialize_pp_stages", "_initialize_stages", "_initialize_stage")
"""What a schedule calls in its first step, whichever its version has: one forward, since torch 2.13 one backward."""
REDUCE = ("perform_reduce_grad", "start_gradient_reduction")  #: the second since torch 2.15, by itself for FSDP2
COMPUTE = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")


class NotASchedule(TypeError):
    """What was given is not a pipeline schedule of a kind that can be watched."""


def stages(schedule: Any) -> list[Any]:
    """This rank's stages, by their number. Raises NotASchedule."""
    found = getattr(schedule, "_stages", None)
    if found is None:
        single = getattr(schedule, "_stage", None)
        found = [] if single is None else [single]
    found = sorted(found, key=lambda stage: int(stage.stage_index))
    if not found:
        raise NotASchedule(
            f"{type(schedule).__name__} is not a schedule of torch.distributed.pipelining that dtobs knows"
            f" (tried with torch {', '.join(TRIED)}): give what has the .step() of the pipeline"
        )
    return list(found)


def plan(schedule: Any) -> Plan:
    """What the schedule does. Raises NotASchedule."""
    own = stages(schedule)
    group = own[0].group
    members = dist.get_process_group_ranks(group) if group is not None else range(dist.get_world_size())
    return Plan(
        schedule=type(schedule).__name__,
        micro_batches=int(schedule._n_microbatches),
        stages=tuple(int(stage.stage_index) for stage in own),
        stage_count=int(own[0].num_stages),
        ranks=tuple(int(rank) for rank in members),
    )


def divides_by(schedule: Any) -> int:
    """What the schedule divides gradients by once all micro-batches were added up."""
    return int(schedule._n_microbatches) if getattr(schedule, "scale_grads", False) else 1


def schedules() -> list[type]:
    """The classes whose ``step`` runs a schedule; none as long as nobody has imported them."""
    module = sys.modules.get("torch.distributed.pipelining.schedules")
    known = (getattr(module, name, None) for name in ("PipelineScheduleSingle", "PipelineScheduleMulti"))
    return [kind for kind in known if kind is not None]


def has_messages() -> bool:
    """Whether this torch sends and waits through the two functions that can be watched."""
    return all(callable(vars(message_owner()).get(name)) for name in (BATCH, WAIT))


def message_owner() -> Any:
    """The module whose functions `BATCH` and `WAIT` are to be replaced."""
    from torch.distributed.pipelining import schedules  # a second of imports that only pipelines need

    return schedules


def size_and_peer(op: Any) -> tuple[int, int]:
    """Bytes of a ``P2POp`` and its peer's rank in the group."""
    tensor = op.tensor
    return tensor.numel() * tensor.itemsize, int(op.group_peer)


def has_loss(schedule: Any) -> bool:
    """Whether the schedule calls a loss function that can be replaced."""
    return callable(vars(schedule).get(LOSS))


def last_stage(own: Sequence[Any]) -> Any:
    """The pipeline's last stage when this rank has it, else None."""
    return next((stage for stage in own if stage.is_last), None)
