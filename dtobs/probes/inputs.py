"""A digest of what each step was trained on: ranks that read the same data have equal ones.

The input is what ``session.batch(...)`` is given; where nobody calls it, the arguments of the root module's forward, or
the whole sequences that torch's ``context_parallel`` split before it: every rank of its mesh has to be given the same.

Private torch: ``_context_parallel_buffers``, which is given them; tried with 2.13. Without it the parts are the input.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import nn

from dtobs.events import Phase
from dtobs.probes.base import Probe
from dtobs.probes.deferred import MAX_PENDING, Arrived, Deferred
from dtobs.probes.digests import device_digest, host_digest, words
from dtobs.probes.layout import local_tensor, tokens_shared_by
from dtobs.probes.modules import around_call, roots, trains

MAX_BYTES = 1 << 20
"""Of a larger tensor (images, video) this much is read, spread evenly over its elements."""
_SPLITS = tuple(
    f"torch.distributed.tensor.experimental.{name}" for name in ("_context_parallel._attention", "_attention")
)
"""Modules that have it; one that was not imported splits nothing."""
SENT_BYTES, SENT_TENSORS = 1 << 16, 4
"""Of what is on a device, so many small tensors a step go to the host to be digested, the others are digested there."""
MOST_TENSORS, MOST_NESTED = 32, 3
"""Tensors of a micro-batch that are read, and how deep in containers they may lie."""


class InputProbe(Probe):
    """Fills in ``input_digest``, folded over the step's micro-batches in order."""

    name = "inputs"

    def __init__(self) -> None:
        super().__init__()
        self.late = Deferred((SENT_TENSORS + 1) * MAX_PENDING)
        self._told = False
        self._digests: list[int | torch.Tensor | None] = []  # None: of what is still on its way from a device
        self._elements = 0  # of the largest tensor of each micro-batch
        self._whole: list[torch.Tensor] = []  # sequences that were split since the last forward
        self._splits = False  # whether such a one was an input of this step: what else the model is given are parts
        self._mesh: list[int] = []  # the ranks they were split over

    def install(self) -> None:
        """Watch the root module's arguments until `batch` is called for the first time."""
        context = self.context
        if context.model is None:
            return
        root = roots(context.model)[0]
        if len(ranks := tokens_shared_by(root)) > 1:
            context.recorder.meta.add("process", token_ranks=ranks)

        def take(root: nn.Module, *args: Any, **kwargs: Any) -> None:
            whole, self._whole = self._whole, []
            if not self._told and trains(root):
                given = _tensors((*args, *(kwargs[k] for k in sorted(kwargs))))
                self._splits = self._splits or bool(whole)
                self._add(whole if self._splits else given, _largest(given))

        around_call(self, root, take, _ignore)
        for name in _SPLITS:
            if hasattr(splits := sys.modules.get(name), "_context_parallel_buffers"):
                self.around(splits, "_context_parallel_buffers", self._split, _ignore)
                break

    def remove(self) -> None:
        """Take the hook away."""
        self._digests = []
        super().remove()

    def step_begin(self) -> None:
        """A new step has had no input yet."""
        self._digests, self._elements, self._splits = [], 0, False

    def batch(self, tensors: dict[str, torch.Tensor]) -> None:
        """One micro-batch, by name."""
        if not self._told:
            self._told, self._digests, self._elements = True, [], 0
        given = _tensors(tensors[name] for name in sorted(tensors))
        self._add(given, _largest(given))

    def step_end(self) -> None:
        """Fold what the step read into one number."""
        context = self.context
        digests, step = self._digests, context.step
        if not digests:
            return
        context.record["input_elements"] = self._elements
        if all(isinstance(d, int) for d in digests):
            context.record["input_digest"] = _fold(digests)
            return
        large = {n: d for n, d in enumerate(digests) if isinstance(d, torch.Tensor)}

        def arrived(values: npt.NDArray[Any]) -> bool:
            for n, value in zip(large, values.view(np.uint64).tolist(), strict=True):
                digests[n] = value
            return whole()

        def whole() -> bool:
            known = [d for d in digests if isinstance(d, int)]
            return len(known) < len(digests) or context.recorder.amend_step(step, input_digest=_fold(known))

        if large:
            self.late.put(torch.stack(list(large.values())), arrived)
        else:
            self.late.after(Arrived(), whole)

    def _split(self, mesh: Any, buffers: Any, *_args: Any, **_named: Any) -> None:
        """Sequences are about to be split over `mesh`; what the model computed, or holds, is no input."""
        if self._told or self.context.model is None:
            return
        held = {buffer.data_ptr() for buffer in nn.Module.buffers(self.context.model)}
        given = [t for t in _tensors(buffers) if not t.requires_grad and t.data_ptr() not in held]
        tokens = [t for t in given if not t.is_floating_point()]
        # What follows writes the parts into the same memory. Masks and labels may be split by calls of their own.
        self._whole = [*self._whole, *(t.clone() for t in tokens or given)][:MOST_TENSORS]
        ranks = mesh.mesh.flatten().tolist()
        if self._whole and ranks != self._mesh:
            self._mesh = ranks
            self.context.recorder.meta.add("process", sequence_ranks=ranks)

    def _add(self, tensors: list[torch.Tensor], elements: int) -> None:
        if self.context.phase == Phase.VALIDATION:
            return
        self._elements += elements
        for listen in self.context.on_inputs:
            listen(tensors)
        for tensor in tensors:
            held = _sample(local_tensor(tensor))
            if held.is_cpu:
                self._digests.append(host_digest(held))
            elif held.nbytes <= SENT_BYTES and len(self._digests) < SENT_TENSORS:
                self._send(held)
            else:
                self._digests.append(device_digest(held))

    def _send(self, values: torch.Tensor) -> None:
        """Copy something small to the host: that launches less than what would digest it on its device."""
        digests, place = self._digests, len(self._digests)
        digests.append(None)

        def arrived(there: npt.NDArray[Any]) -> None:
            digests[place] = xxhash.xxh3_64_intdigest(np.ascontiguousarray(there).data)

        self.late.put(words(values), arrived)


def _largest(tensors: list[torch.Tensor]) -> int:
    """Elements that this rank has of the largest of `tensors`."""
    return max((local_tensor(t).numel() for t in tensors), default=0)


def _ignore(_: object) -> None:
    """The root's forward as such is another probe's business."""


def _tensors(values: Iterable[Any], depth: int = 0) -> list[torch.Tensor]:
    """The tensors among `values`; where there is none, those in the containers among them (``model(batch)``).

    What a container has beside a tensor is left out: it may be a state that the loop carries on (``model(x, (h, c))``).
    """
    given = list(values)
    found = [v for v in given if isinstance(v, torch.Tensor)]
    for value in given if not found and depth < MOST_NESTED else ():
        if isinstance(value, Mapping):
            found += _tensors((value[key] for key in sorted(value, key=str)), depth + 1)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value, depth + 1)
        elif is_dataclass(value):
            found += _tensors((getattr(value, each.name) for each in fields(value)), depth + 1)
    return [v for v in found[:MOST_TENSORS] if v.numel() and not v.is_sparse]


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or of a large one an even part of it: the same part on every rank for equal shapes."""
    stride = -(-tensor.numel() * tensor.element_size() // MAX_BYTES)
    return tensor if stride <= 1 else tensor.detach().reshape(-1)[::stride]


def _fold(digests: Sequence[Any]) -> int:
    return xxhash.xxh3_64_intdigest(np.array(digests, np.uint64).tobytes()) or 1
