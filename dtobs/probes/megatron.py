"""What Megatron-core says of a model's parallelism: who reads other samples, and who holds copies of a parameter.

Megatron-core has no DeviceMesh and no wrapper of torch's. Its ``parallel_state`` keeps the process groups, and two
attributes of a parameter say over which of them its gradient is reduced: ``allreduce = False`` that it is an expert's,
``sequence_parallel = True`` that tensor-parallel ranks add up theirs too (NVIDIA/Megatron-LM,
``megatron/core/distributed/finalize_model_grads.py``). Everything else is taken for a shard of a tensor-parallel group:
`tensor_model_parallel` says so as well, but is missing where weights are not initialized (``perform_initialization``),
and of learnable softmax offsets.

Nothing is imported here: a program that does not use Megatron-core pays for a look at `sys.modules`.

Tried with megatron-core 0.16.1 on CPU and Gloo. Where a version keeps its groups elsewhere, a model is taken for one of
which nothing is known.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class MegatronGroups:
    """This rank among the others; every group holds this rank. `coordinates` are of the dimensions with two and more
    ranks: "pp", "dp", "cp" and "tp".
    """

    coordinates: dict[str, int]
    data: Ranks  #: that do the same work on different samples
    dense: Ranks  #: among which gradients are reduced
    duplicates: Ranks  #: that hold copies of what sequence parallelism adds up over tensor-parallel ranks
    experts: Ranks  #: the first of these two, of experts

    @property
    def stage(self) -> int:
        """The pipeline stage."""
        return self.coordinates.get("pp", 0)

    def copies(self, parameter: torch.Tensor) -> Ranks:
        """The ranks that hold what this one holds of `parameter`, and whose gradients of it are reduced together."""
        if not _dense(parameter):
            return self.experts
        return self.dense if self.shards(parameter) else self.duplicates

    def shards(self, parameter: torch.Tensor) -> bool:
        """Whether each tensor-parallel rank may hold another part of `parameter`."""
        return "tp" in self.coordinates and _dense(parameter) and not getattr(parameter, "sequence_parallel", False)


def megatron_groups(model: nn.Module | None) -> MegatronGroups | None:
    """The groups of a model that is made of Megatron-core's modules; None for any other."""
    state: Any = sys.modules.get("megatron.core.parallel_state")
    if state is None or model is None or not any(map(_is_megatron, model.modules())):
        return None
    try:
        if not state.model_parallel_is_initialized():
            return None
        dimensions = {
            "pp": state.get_pipeline_model_parallel_group(),
            "dp": state.get_data_parallel_group(),
            "cp": state.get_context_parallel_group(),
            "tp": state.get_tensor_model_parallel_group(),
        }
        others = (
            state.get_data_parallel_group(with_context_parallel=True),
            state.get_tensor_and_data_parallel_group(with_context_parallel=True),
            state.get_expert_data_parallel_group(),
        )
        ranks = {name: _ranks(group) for name, group in dimensions.items()}
        dense, duplicates, experts = map(_ranks, others)
    except (AttributeError, TypeError, AssertionError, LookupError):  # the last one of a group that was destroyed
        return None
    me = dist.get_rank()
    places = {name: members.index(me) for name, members in ranks.items() if len(members) > 1}
    return MegatronGroups(places, ranks["dp"], dense, duplicates, experts)


def _is_megatron(module: nn.Module) -> bool:
    return any(kind.__module__.startswith("megatron.core.") for kind in type(module).__mro__)


def _dense(parameter: torch.Tensor) -> bool:
    return bool(getattr(parameter, "allreduce", True))


def _ranks(group: Any) -> Ranks:
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError("no process group")
    return tuple(dist.get_process_group_ranks(group))
