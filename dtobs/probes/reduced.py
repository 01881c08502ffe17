"""The gradient after reduction, as the optimizer finds it (so after clipping), on sampled steps.

``reduced_square``  this rank's share of the squared norm: the shares of all ranks add up to the whole model's
``reduced_norm``    the norm, where one rank holds all of it

A loop that reports its own norm (``session.report(gradient_norm=)``) is believed, and nothing is read here.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor

from dtobs.probes.base import Context, Probe
from dtobs.probes.deferred import Deferred
from dtobs.probes.layout import Named, is_partial, local_tensor, model_tensors
from dtobs.probes.sampling import period

LEAST_PERIOD = 10


class ReducedGradientProbe(Probe):
    """Fills in ``reduced_square`` and ``reduced_norm``, without a collective."""

    name = "reduced gradients"

    def __init__(self) -> None:
        super().__init__()
        self._tensors: list[Named] = []
        self._deferred = Deferred()
        self._every = LEAST_PERIOD
        self._own_norm = math.nan
        self._whole = False

    def install(self, context: Context) -> None:
        """Remember whose gradients to read."""
        if context.model is None:
            return
        self._tensors = [t for t in model_tensors(context.model, context.replicas) if t.tensor.requires_grad]
        self._every = max(LEAST_PERIOD, period([t.tensor for t in self._tensors]))
        self._whole = all(not isinstance(t.tensor, DTensor) and t.row.replica for t in self._tensors)

    def remove(self) -> None:
        """Let go of the model."""
        self._tensors = []
        self._deferred.clear()

    def before_optimizer(self, context: Context) -> None:
        """On every K-th step, K from the model's size."""
        if self._tensors and context.step % self._every == 0 and not self._reported(context):
            self._read(context)

    def step_end(self, context: Context) -> None:
        """Values of earlier steps that a device has delivered."""
        self._deferred.poll()

    def _reported(self, context: Context) -> bool:
        """Whether the loop itself says what its norm is (of this step, or of the last one)."""
        said = context.recorder.page.get("reduced_norm")
        of_this_step = not math.isnan(float(context.record["reduced_norm"]))
        return of_this_step or not (math.isnan(said) or said == self._own_norm)

    def _read(self, context: Context) -> None:
        norms: list[torch.Tensor] = []
        shares: list[float] = []
        for named in self._tensors:
            gradient = named.tensor.grad
            if gradient is None:
                continue
            if is_partial(gradient):
                return  # not reduced yet as far as this tensor goes: the sum over ranks would be wrong
            values = local_tensor(gradient)
            values = values.coalesce().values() if values.is_sparse else values
            norms.append(
                torch.linalg.vector_norm(values, dtype=torch.float32 if values.itemsize < 4 else None)
            )
            shares.append(named.share)
        if not norms:
            return
        step, whole = context.step, self._whole

        def summary(values: npt.NDArray[Any]) -> dict[str, float]:
            squares = values.astype(np.float64) ** 2
            found = {"reduced_square": float((squares * np.array(shares)).sum())}
            if whole:
                found["reduced_norm"] = self._own_norm = math.sqrt(float(squares.sum()))
            return found

        if all(n.is_cpu for n in norms):
            for name, value in summary(np.array([n.item() for n in norms])).items():
                context.record[name] = value
            return
        device = next(n.device for n in norms if not n.is_cpu)
        stacked = torch.stack([n.to(device=device, dtype=torch.float64) for n in norms])
        self._deferred.put(stacked, lambda values: context.recorder.amend_step(step, **summary(values)))
