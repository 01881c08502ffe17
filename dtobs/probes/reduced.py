"""The gradient after reduction and before clipping, on sampled steps.

Where torch's ``clip_grad_norm_`` is called it is read there, else just before the optimizer steps: what a loop did to
it by itself until then is in it, and a loop that clips by itself says so by reporting its own norm.

Whether it is finite is looked at in every step in which the local gradient is not read whole: a NaN may arise in a
tensor that nobody sampled, and the step after it everything is NaN everywhere. One that a matrix product makes fills a
row or a column of its gradient, so one row and one column are looked at of each; ranks that are given the same gradient
share the tensors between them. A single element is found within a turn, or by what it does to the parameters. On a
device some tensors are looked at, and all of each: to cut rows and columns would cost the host more.

``reduced_square``  this rank's share of the squared norm: the shares of all ranks add up to the whole model's
``reduced_norm``    the norm, where one rank holds all of it

Private torch: ``clip_grad._clip_grads_with_norm_``, which is given what is about to be clipped; tried with 2.13.

A loop that reports its own norm (``session.report(gradient_norm=)``) is believed, and nothing is read here.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor

from dtobs.probes import gradients
from dtobs.probes.base import Probe
from dtobs.probes.layout import Named, is_partial, local_tensor, model_tensors
from dtobs.probes.norms import FEW, device_norms, device_peaks, host_array, host_square, squares, together
from dtobs.probes.rotation import place
from dtobs.probes.sampling import LEAST_REDUCED_PERIOD, period, reduced_period

SMALL = 1 << 10
"""Elements of a gradient that is looked at whole: two slices cost more."""
MOST_AT_ONCE = 16
"""Tensors of a device that are looked at in one step."""
FIRST_CHECKED, CHECKED_EVERY = 64, 4
"""On a device they are looked at in each of the first steps, and in every such one after them."""


class ReducedGradientProbe(Probe):
    """Fills in ``reduced_square`` and ``reduced_norm``, without a collective."""

    name = "reduced gradients"

    def __init__(self) -> None:
        super().__init__()
        self._tensors: list[Named] = []
        self._every = LEAST_REDUCED_PERIOD
        self._own_norm = math.nan
        self._whole = False
        # Squares of this step (norms, on a device) and this rank's shares, by tensor; which were read before clipping.
        self._found: dict[int, tuple[float | torch.Tensor, float]] = {}
        self._clipped: set[int] = set()

    def install(self) -> None:
        """Remember whose gradients to read."""
        context = self.context
        if context.model is None:
            return
        tensors = model_tensors(context.model, context.replicas)
        self._tensors = [t for t in tensors if t.tensor.requires_grad]
        self._rows = {id(t): row for row, t in enumerate(tensors)}
        self._whole_every = period([t.tensor for t in tensors], gradients.WHOLE_BYTES_A_STEP)
        self._every, self._bad = reduced_period(self._whole_every), False
        clip: Any = getattr(torch.nn.utils, "clip_grad", None)
        if getattr(clip, "_clip_grads_with_norm_", None) is not None:
            self.around(clip, "_clip_grads_with_norm_", self._before_clipping, lambda _began: None, _not_traced)
        keys = [(t.tensor, t.row.replica) for t in self._tensors]
        self._whole = all(key and "/" not in key and not isinstance(tensor, DTensor) for tensor, key in keys)

    def remove(self) -> None:
        """Let go of the model."""
        self._tensors, self._found, self._clipped = [], {}, set()
        super().remove()

    def before_optimizer(self) -> None:
        """On every K-th step, K from the model's size; whether it is finite, on the others."""
        if not self._tensors:
            return
        step = self.context.step
        tensors = self._given()
        if self._clipped:
            self._clipped -= {id(named) for named in tensors}  # what they get now is settled
        if step % self._every == 0 and not self._reported():
            self._read([named for named in tensors if id(named) not in self._found])  # others were read before clipping
        if self._whole_every > 1 and step % self._whole_every and not self._bad:
            self._check(tensors)

    def _before_clipping(self, parameters: Any, max_norm: Any, *_args: Any, **_named: Any) -> None:
        """The gradients of `parameters` are about to be multiplied by what brings their norm down to `max_norm`."""
        for told in self.context.on_clipping:
            told(parameters, max_norm)
        step = self.context.step
        if step % self._every or not self._tensors or not isinstance(parameters, (list, tuple)) or self._reported():
            return
        mine = {id(parameter) for parameter in parameters}
        before = set(self._found)
        self._read([n for n in self._tensors if id(n.tensor) in mine and id(n) not in before])  # the first clip counts
        self._clipped |= self._found.keys() - before

    def backward_begin(self, tensors: Any) -> None:
        """More is added to gradients that were clipped: what was read of them is not what the optimizer gets."""
        if self._clipped and self.context.stepping is None:
            for key in self._clipped:
                self._found.pop(key, None)
            self._clipped = set()

    def _given(self) -> list[Named]:
        """The tensors of the optimizer that steps; all of them where there is one optimizer."""
        context = self.context
        if len(context.optimizers) < 2:
            return self._tensors
        mine = context.trained_by(context.stepping)
        return [named for named in self._tensors if id(named.tensor) in mine]

    def _check(self, tensors: list[Named]) -> None:
        """Whether a row and a column of each tensor are finite; on a device, all of some tensors."""
        step = self.context.step
        later: list[Named] = []
        for row, named in enumerate(tensors):
            mine, copies = named.copy
            if copies > 1 and (row + step) % copies != mine:
                continue
            if not named.tensor.is_cpu:
                later.append(named)
                continue
            gradient = named.tensor.grad
            if gradient is None or gradient.is_sparse:
                continue
            for some in cross(local_tensor(gradient), step):
                if not math.isfinite(host_square(some)) and not _finite(some):
                    self._note_bad(step, named)
                    return
        every = 1 if step < FIRST_CHECKED else CHECKED_EVERY
        if later and step % every == every - 1:  # others than those in which a small model's are read whole
            turns = -(-len(later) // MOST_AT_ONCE)
            turn = step // math.lcm(every, later[0].copy[1])  # goes up by one with each look at the same tensors
            self._check_later(later[turn % turns :: turns])

    def _check_later(self, tensors: list[Named]) -> None:
        """The same on a device, with few kernels."""
        step, device = self.context.step, tensors[0].tensor.device
        given = [(named, named.tensor.grad) for named in tensors if named.tensor.device == device]
        held = [(named, local_tensor(grad)) for named, grad in given if grad is not None and not grad.is_sparse]
        looked = [(named, values) for named, values in held if values.numel()]
        if not looked:
            return

        def arrived(peaks: npt.NDArray[Any]) -> None:
            bad = np.flatnonzero(~np.isfinite(peaks))
            if len(bad) and not self._bad:
                self._note_bad(step, looked[int(bad[0])][0])

        self.late.put(device_peaks([values for _, values in looked]), arrived)

    def _note_bad(self, step: int, named: Named) -> None:
        self._bad = True  # the first is of interest
        self.context.recorder.meta.add("nonfinite", seen="reduced", step=step, row=self._rows[id(named)])

    def _reported(self) -> bool:
        """Whether the loop itself says what its norm is (of this step, or of the last one)."""
        said = self.context.recorder.page.get("reduced_norm")
        of_this_step = not math.isnan(float(self.context.record["reduced_norm"]))
        return of_this_step or not (math.isnan(said) or said == self._own_norm)

    def _read(self, tensors: list[Named]) -> None:
        found: dict[int, tuple[float | torch.Tensor, float]] = {}
        later: list[tuple[Named, torch.Tensor]] = []
        for named in tensors:
            gradient = named.tensor.grad
            if gradient is None:
                continue
            if is_partial(gradient):
                return  # not reduced yet as far as this tensor goes: the sum over ranks would be wrong
            values = local_tensor(gradient)
            values = values.coalesce().values() if values.is_sparse else values
            if values.is_cpu:
                found[id(named)] = host_square(values), named.share
            else:
                later.append((named, values))
        for (named, _), norm in zip(later, device_norms([values for _, values in later]), strict=True):
            found[id(named)] = norm, named.share
        self._found |= found

    def step_begin(self) -> None:
        """Nothing has been given to an optimizer yet."""
        self._found, self._clipped = {}, set()

    def step_end(self) -> None:
        """Put together what the step's optimizers were given."""
        if not self._found:
            return
        found, shares = zip(*self._found.values(), strict=True)
        self._found = {}
        context = self.context
        step, whole = context.step, self._whole
        said = not math.isnan(float(context.record["reduced_norm"]))  # by the loop, after the optimizer's step

        def summary(given: npt.NDArray[Any]) -> dict[str, float]:
            fields = {"reduced_square": float((given * np.array(shares)).sum())}
            if whole and not said:
                fields["reduced_norm"] = self._own_norm = math.sqrt(float(given.sum()))
            return fields

        norms = [norm for norm in found if isinstance(norm, torch.Tensor)]
        known = np.array([math.nan if isinstance(square, torch.Tensor) else square for square in found])
        if not norms:
            for name, value in summary(known).items():
                context.record[name] = value
            return
        late = [n for n, square in enumerate(found) if isinstance(square, torch.Tensor)]

        def arrived(values: npt.NDArray[Any]) -> bool:
            known[late] = squares(values)
            return context.recorder.amend_step(step, **summary(known))

        self.late.put(together(norms), arrived)


def cross(values: torch.Tensor, step: int) -> tuple[torch.Tensor | npt.NDArray[Any], ...]:
    """One row and one column of `values`, others in each step; all of it where it is small or has but one dimension.

    As numpy arrays where that is cheaper and possible.
    """
    if values.dim() < 2 or values.numel() <= SMALL:
        return (values,) if values.numel() else ()
    if values.dim() > 2 and values.is_contiguous():
        values = values.view(len(values), -1)
    rows, columns = values.shape[:2]
    row, column = place(step, rows), place(step, columns)
    held = host_array(values) if values.dim() == 2 and values.is_cpu and max(rows, columns) <= FEW else None
    if held is not None:
        return held[row], held[:, column]
    return values.select(0, row), values.select(1, column)


def _finite(values: torch.Tensor | npt.NDArray[Any]) -> bool:
    """Whether only the squares overflowed."""
    return bool((torch.isfinite(values) if isinstance(values, torch.Tensor) else np.isfinite(values)).all())


def _not_traced(*_arguments: Any) -> bool:
    return not torch.compiler.is_compiling()
