"""The flat parameters of FSDP1 (`FullyShardedDataParallel`): which ranks share one, and what lies where in it.

FSDP1 lays the parameters of a unit end to end in one flat parameter, of which each rank keeps a part. Between two
steps, what the optimizer holds is that part, or, with ``use_orig_params=True``, the original parameters as views of
it; what autograd adds to is the flat parameter as a whole.

Private torch: ``FullyShardedDataParallel._handle`` and `_inter_node_pg`, and ``FlatParameter._params`` with its
`_numels_with_padding`, `_is_padding_mask` and `_post_backward_hook_state`; tried with 2.6 and 2.13. Where a version
keeps them elsewhere, a model is taken for one of which nothing is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FullyShardedDataParallel


@dataclass(frozen=True)
class Flat:
    """One flat parameter. `name` is the unit's in the model, without wrappers; "" for the outermost."""

    parameter: nn.Parameter
    name: str
    ranks: tuple[int, ...]  #: whose gradients are averaged, this one among them
    copies: tuple[int, ...]  #: the ranks that keep the same part of it
    parts: int
    part: int  #: which of `parts` this rank keeps
    length: int  #: elements as a whole
    originals: tuple[tuple[nn.Parameter, int, int], ...]
    """The original parameters that an optimizer holds in its place, each with where it begins and ends in the whole."""

    @property
    def held(self) -> list[nn.Parameter]:
        """What the model has of it between two steps, and an optimizer holds."""
        return [original for original, _, _ in self.originals] or [self.parameter]


def flat_parameters(model: nn.Module) -> list[Flat]:
    """Those of the FSDP1 units in `model`, outermost first; [] where there are none."""
    if not any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return []
    found = []
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            flat = _flat(name, module)
            if flat is not None:
                found.append(flat)
    return found


def accumulator(parameter: Any) -> Any:
    """The node of autograd that adds to a flat parameter in this backward; None where FSDP1 does not keep it.

    It is made in the forward, while the parameter has the type that it is computed in, and not found by it later.
    """
    kept: Any = getattr(parameter, "_post_backward_hook_state", ())
    return kept[0] if len(kept) > 1 else None


def _flat(name: str, module: Any) -> Flat | None:
    handle = getattr(module, "_handle", None)
    parameter: Any = getattr(handle, "flat_param", None)
    group, beside = getattr(module, "process_group", None), getattr(module, "_inter_node_pg", None)
    if parameter is None or group not in distributed_c10d._world.pg_group_ranks:
        return None  # or the process group was destroyed
    me, ranks = dist.get_rank(), tuple(dist.get_process_group_ranks(group))
    copies = tuple(dist.get_process_group_ranks(beside)) if isinstance(beside, dist.ProcessGroup) else (me,)
    parts, part = len(ranks), ranks.index(me)
    if not getattr(handle, "uses_sharded_strategy", True):
        copies, parts, part = ranks, 1, 0
    elif len(copies) > 1:  # the groups are the rows and columns of one grid
        ranks = tuple(sorted({rank + other - me for rank in ranks for other in copies}))
    ends = list(accumulate(getattr(parameter, "_numels_with_padding", ())))
    padding = getattr(parameter, "_is_padding_mask", ())
    begins = [(begin, end) for begin, end, pads in zip([0, *ends], ends, padding, strict=False) if not pads]
    originals = getattr(parameter, "_params", None) or ()
    if originals and len(originals) != len(begins):
        return None
    return Flat(
        parameter,
        ".".join(word for word in name.split(".") if not word.startswith("_fsdp_wrapped")),
        ranks,
        copies,
        parts,
        part,
        ends[-1] if ends else parameter.numel(),
        tuple((original, begin, end) for original, (begin, end) in zip(originals, begins, strict=False)),
    )
