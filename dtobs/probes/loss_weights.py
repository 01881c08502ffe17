"""What each token counts in the loss, read from the graph that backward is handed; and the loss itself.

From the tensor given to ``backward`` it is a few nodes to the cross-entropy, which knows how many targets it counted;
the gradient that reaches it is the weight they have together. Where there is none, what the loss was multiplied with or
divided by is passed until its mean or sum: the gradient that reaches that is the weight of the whole loss. Where a loop
reports no loss of its own, the value that backward was given is the step's loss, freed of its weight (a loss scale, a
number of micro-batches).

Blind where the loss is fused into a kernel or compiled, or is a sum of several of which none is a cross-entropy: then
only the value is known.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from dtobs.probes.backward import compiled_autograd
from dtobs.probes.base import Probe
from dtobs.probes.layout import local_tensor
from dtobs.probes.rotation import Rotation
from dtobs.recording.laws import LOSS_WEIGHTS

NODES = 64
"""Of the graph that are looked at; what lies further from the loss is the model."""
BACKWARDS = 64
"""Of one step that are recorded."""
_NONE, _MEAN = 0, 1  # the reductions as the graph numbers them
_SCALES = ("MulBackward0", "DivBackward0", "NegBackward0", "ToCopyBackward0", "CloneBackward0", "_DDPSinkBackward")
_REDUCING = ("MseLoss", "SmoothL1Loss", "HuberLoss", "SoftMarginLoss", "BinaryCrossEntropy")
"""Losses of torch that are one node of the graph and reduce as it is told to; others end in a mean or a sum."""
_FIELDS = ("losses", "tokens", "least", "largest", "total", "loss")


class LossWeightProbe(Probe):
    """Writes the ring LOSS_WEIGHTS, and ``loss`` of steps for which nobody reports one."""

    name = "loss weights"

    def __init__(self) -> None:
        super().__init__()
        self._rotation = Rotation(0)
        self._looking = False
        self._found: list[list[torch.Tensor]] = []  # of the backward in progress, by loss: the four numbers of it
        self._other: list[torch.Tensor] | None = None  # the same of a loss that is no cross-entropy
        self._value: torch.Tensor | None = None
        self._seen: list[torch.Tensor] = []  # one row of _FIELDS for each backward of the step
        self._handles: list[Any] = []
        self._own_loss = math.nan
        self._record = np.zeros((), LOSS_WEIGHTS.dtype)

    def install(self) -> None:
        """All of it hangs on the backward."""
        self._rotation = Rotation(1)

    def remove(self) -> None:
        """Let go of everything."""
        self.backward_end()
        self._seen = []
        super().remove()

    def step_begin(self) -> None:
        """Choose whether this step is sampled; forget what the last one recorded."""
        self._looking, self._seen = bool(self._rotation.rows(self.context.step)), []

    def backward_begin(self, tensors: Any) -> None:
        """Find the losses that this backward begins with, and listen to what reaches them."""
        if not self._looking or len(self._seen) >= BACKWARDS:
            return
        begin = time.perf_counter_ns()
        root = tensors[0] if isinstance(tensors, Sequence) and len(tensors) == 1 else tensors
        if isinstance(root, torch.Tensor) and root.numel() == 1 and root.grad_fn is not None:
            self._value = _whole(root)
            for node, reader in self._readers(root.grad_fn) if not compiled_autograd() else ():
                self._handles.append((node, node.register_prehook(self.guard(reader))))
        self._rotation.spent(time.perf_counter_ns() - begin)

    def backward_end(self) -> None:
        """Put together what was seen."""
        while self._handles:
            self._handles.pop()[1].remove()
        value, found, other = self._value, self._found, self._other
        self._value, self._found, self._other = None, [], None
        if value is None:
            return
        begin = time.perf_counter_ns()
        with torch.no_grad():
            if found:
                tokens, least, largest, total = (torch.stack(column) for column in zip(*found, strict=True))
                seen = [tokens.sum(), least.min(), largest.max(), total.sum()]
            else:
                seen = other or [value.new_full((), math.nan, dtype=torch.float64)] * 4
            count = value.new_full((), len(found), dtype=torch.float64)
            least, largest, total, loss = (
                each.to(torch.float64).reshape(()) / self.context.loss_divisor for each in (*seen[1:], value)
            )
            self._seen.append(torch.stack([count, seen[0], least, largest, total, loss]))
        self._rotation.spent(time.perf_counter_ns() - begin)

    def step_end(self) -> None:
        """Write down the backwards of this step."""
        if not self._seen:
            return
        begin = time.perf_counter_ns()
        self._finish()
        self._rotation.spent(time.perf_counter_ns() - begin)

    def _finish(self) -> None:
        rows, self._seen = torch.stack(self._seen), []
        step, context = self.context.step, self.context
        scaled = context.loss_scale is not None or math.isfinite(float(context.record["loss_scale"]))

        def tells(loss: float) -> bool:
            """An overflow under a loss scaler is its way to find its scale, and says nothing of the loss."""
            return (math.isfinite(loss) or not scaled) and self._nobody_reports()

        if rows.is_cpu:
            loss = self._write(step, rows.numpy())
            if tells(loss):
                self._own_loss = loss
                context.record["loss"], context.record["losses"] = loss, 1
                context.recorder.page.set(loss=loss)
            return

        def arrived(values: Any) -> None:
            loss = self._write(step, values)
            if tells(loss):
                self._own_loss = loss
                context.recorder.amend_step(step, loss=loss, losses=1)
                context.recorder.page.set(loss=loss)

        self.late.put(rows, arrived)

    def _write(self, step: int, rows: Any) -> float:
        """Append `rows`, one for each backward; returns the step's loss, each token weighed as the loop does."""
        ring, record = self.context.recorder.law(LOSS_WEIGHTS), self._record
        for micro, row in enumerate(rows.tolist()):
            record["step"], record["micro"] = step, micro
            for name, value in zip(_FIELDS, row, strict=True):
                record[name] = value
            ring.append(record)
        known = rows[rows[:, 0] > 0]  # a loss whose chunks had backwards of their own comes once more without any
        total = float(known[:, 4].sum())
        if total > 0:
            return float(known[:, 5].sum()) / total
        losses = float(rows[:, 5].sum())
        scale = float(self.context.record["loss_scale"])
        return losses / scale if scale > 0 else losses

    def _nobody_reports(self) -> bool:
        """Whether the loss on the page, if any, is one of ours."""
        said = self.context.recorder.page.get("loss")
        return not self.context.record["losses"] and (math.isnan(said) or said == self._own_loss)

    def _readers(self, root: Any) -> list[tuple[Any, Any]]:
        """The nodes to listen to and what reads each: cross-entropies, or the mean or sum that the loss is."""
        found = [(node, self._reader(node)) for node in loss_nodes(root)]
        other = reducing_node(root) if not found else None
        return found if other is None else [(other, self._other_reader(other))]

    def _reader(self, node: Any) -> Any:
        """Given the gradient of a loss, note how many targets it counts and with what weight."""
        reduction = int(node._saved_reduction)

        def read(gradients: tuple[torch.Tensor | None, ...]) -> None:
            gradient = _whole(gradients[0])
            count = _whole(node._saved_total_weight if reduction == _MEAN else node._saved_target)
            if gradient is None or count is None:
                return
            begin = time.perf_counter_ns()
            with torch.no_grad():
                weights = gradient.to(torch.float64)
                if reduction == _MEAN:
                    tokens = count.to(torch.float64)
                    self._found.append([tokens, weights / tokens, weights / tokens, weights])
                else:
                    counted = count != _signed(node._saved_ignore_index)
                    if reduction == _NONE:  # a mask of the loop's own leaves zeros
                        counted = counted & (weights != 0)
                    else:
                        weights = weights.expand(counted.shape)
                    tokens = counted.sum().to(torch.float64)
                    least = torch.where(counted, weights, math.inf).min()
                    largest = torch.where(counted, weights, -math.inf).max()
                    self._found.append([tokens, least, largest, torch.where(counted, weights, 0.0).sum()])
            self._rotation.spent(time.perf_counter_ns() - begin)

        return read

    def _other_reader(self, node: Any) -> Any:
        """Given the gradient of a mean or a sum, note the weight of the whole loss, and of how many elements it is."""

        def read(gradients: tuple[torch.Tensor | None, ...]) -> None:
            gradient = _whole(gradients[0])
            if gradient is None or gradient.numel() != 1:
                return
            begin = time.perf_counter_ns()
            with torch.no_grad():
                elements, is_mean = _reduced(node)
                each = gradient.to(torch.float64).abs().reshape(()) / (max(elements, 1) if is_mean else 1)
                self._other = [torch.full_like(each, elements), each, each, each * elements]
            self._rotation.spent(time.perf_counter_ns() - begin)

        return read


def reducing_node(root: Any) -> Any:
    """The mean or the sum that a loss is but for numbers it was multiplied with; None where it is something else."""
    node = root
    for _ in range(NODES):
        if node.name().startswith((*_REDUCING, "MeanBackward0", "SumBackward0")):
            return node if getattr(node, "_saved_reduction", _MEAN) != _NONE else None
        following = [each for each, _ in node.next_functions if each is not None]
        if node.name() not in _SCALES or len(following) != 1:
            return None
        node = following[0]
    return None


def _reduced(node: Any) -> tuple[int, bool]:
    """Of how many elements the node makes one, and whether it is their mean."""
    if node.name() == "MeanBackward0":
        return int(node._saved_self_sym_numel), True
    if node.name() == "SumBackward0":
        return math.prod(map(int, node._saved_self_sym_sizes)), False
    return int(node._saved_target.numel()), int(node._saved_reduction) == _MEAN


def loss_nodes(root: Any) -> list[Any]:
    """The cross-entropies within reach of `root`, whose targets all count alike; what lies behind them is not searched.

    Raises nothing: a node that does not look as expected is none of them.
    """
    found, queue, seen = [], [root], {root}
    for node in queue:
        if node.name().startswith("NllLoss"):
            if getattr(node, "_saved_weight", None) is None and hasattr(node, "_saved_ignore_index"):
                found.append(node)
            continue
        for following, _ in node.next_functions:
            if following is not None and following not in seen and len(queue) < NODES:
                seen.add(following)
                queue.append(following)
    return found


def _whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """What a DTensor of which each rank has all holds, outside autograd (`loss_parallel` makes the loss one); None
    where this rank has a part of it.
    """
    if isinstance(tensor, DTensor) and not all(placement.is_replicate() for placement in tensor.placements):
        return None
    return local_tensor(tensor) if tensor is not None else None


def _signed(number: int) -> int:
    """An index as the graph saves it, which knows no negative numbers."""
    return number - (1 << 64) if number >= 1 << 63 else number
