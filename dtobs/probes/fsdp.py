"""The gathered parameters of FSDP2: private to torch, and the only place where the gradient before reduction exists.

Tried with torch 2.13.0. Where a version keeps its state elsewhere, `fsdp_parameters` finds none gathered, and local
gradients of sharded parameters are not measured (``local_norm`` stays NaN).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from dtobs.probes.layout import is_fsdp

TRIED = ("2.13.0",)


def fsdp_parameters(model: nn.Module) -> dict[int, nn.Parameter | None]:
    """id of each parameter that FSDP2 shards → what autograd sees in its place; None until it was first gathered."""
    found: dict[int, nn.Parameter | None] = {}
    for module in model.modules():
        if is_fsdp(module):
            for parameter in module.parameters():
                if isinstance(parameter, DTensor):
                    found.setdefault(id(parameter), None)
            for state in _states(module):
                sharded = getattr(state, "sharded_param", None)
                if sharded is not None:
                    found[id(sharded)] = getattr(state, "_unsharded_param", None)
    return found


def _states(module: Any) -> Iterator[Any]:
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [getattr(state, "_fsdp_param_group", None)]
    for group in groups:
        yield from getattr(group, "fsdp_params", ())
