"""Memory of sharded training and of recomputation, counted tensor by tensor: a CPU's allocator keeps no statistics.

torch's own trackers (`torch.distributed._tools`) attribute every live storage to a kind while a real step runs.

FSDP        (P + G + O) / W + A   with FP32 parameters P = 4N bytes, gradients G = 4N, AdamW's state O = 8N for N
            parameters on W ranks; what the law leaves out is reported beside it: gathered parameters, whole gradients,
            and the buffers of all-gather and reduce-scatter
recompute   what the saved activations of a step are at their peak, as a share of those without recomputation
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import FSDPModule

from runtime import phases
from tests.benchmarks import training

KINDS = {
    "parameters": ("Parameter", "Sharded Param"),
    "gradients": ("Gradient", "Sharded Grad"),
    "optimizer": ("Optstate", "OptState"),
    "activations": ("Activation",),
    "gathered": ("Unsharded Param", "Unsharded Grad", "All Gather", "Reduce Scatter"),
    "temporary": ("Temp", "Buffer", "Inputs", "Other"),
}
STATE = ("parameters", "gradients", "optimizer")


class Moments:
    """A listener of the runtime's phases: what is held when a backward and when the optimizer begins."""

    def __init__(self, tracker: Any) -> None:
        self._tracker = tracker
        self.held: dict[str, dict[str, int]] = {}

    def begin(self, name: str) -> None:
        """A phase begins."""
        if name in ("backward", "optimizer"):
            self.held[name] = _sizes(self._tracker.get_tracker_snapshot("current"))

    def end(self, name: str) -> None: ...

    def step(self, number: int) -> None: ...

    def batch(self, **tensors: torch.Tensor) -> None: ...

    def report(self, **values: float) -> None: ...


def held(rank: int, ranks: int, arguments: tuple[str, ...]) -> dict[str, int]:
    """Bytes of each of `KINDS` in this rank's third step.

    State as the optimizer finds it, activations as the backward does, the rest at the peak of the step. `elements`
    is N of the whole model.
    """
    made = training.from_flags(arguments)
    training.go_on(made, 2)  # now the optimizer's state exists
    (model,) = made.model.parts
    tracker: Any
    if isinstance(model, FSDPModule):
        tracker = FSDPMemTracker(model, made.optimizer)
    else:
        tracker = MemTracker()
        tracker.track_external(model, made.optimizer)
    moments = Moments(tracker)
    stop = phases.listen(moments)
    with tracker:
        training.go_on(made, 1)
    stop()
    dist.barrier()
    found = _sizes(tracker.get_tracker_snapshot("peak"))
    found |= {name: moments.held["optimizer"][name] for name in STATE}
    found["activations"] = moments.held["backward"]["activations"]
    return {**found, "elements": sum(parameter.numel() for parameter in made.model.parameters)}


def _sizes(snapshot: dict[torch.device, dict[Any, int]]) -> dict[str, int]:
    by_name = {getattr(kind, "value", str(kind)): size for kind, size in snapshot[torch.device("cpu")].items()}
    return {kind: sum(by_name.get(name, 0) for name in names) for kind, names in KINDS.items()}
