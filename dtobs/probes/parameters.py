"""Digests of every parameter after each step: copies of a model that drift apart show it here.

They are read just before the *next* optimizer step: until then a sharded optimizer may still bring the copies together,
after its own step or as late as in the next forward. So what the last step of a run left is not read.

Read every K steps, K from the model's size and so the same on every copy (1 for small models: the first step is exact).
Before the first optimizer step they are read as ``step - 1``: what the model began with.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch.distributed.tensor import DTensor

from dtobs.probes.base import Probe
from dtobs.probes.digests import device_digests, host_digest, words
from dtobs.probes.first_moves import FirstMoves, sample
from dtobs.probes.host_memory import host_memory
from dtobs.probes.layout import Named, ParameterLayout, find_layout, local_tensor, model_tensors, replica_key
from dtobs.probes.process_groups import dimension
from dtobs.probes.reductions import Reductions
from dtobs.probes.sampling import period


class ParameterProbe(Probe):
    """Writes the parameter table, the ``layout`` entry, the digests, and ``params_digest`` and ``learning_rate``."""

    name = "parameters"

    def __init__(self) -> None:
        super().__init__()
        self._tensors: list[Named] = []
        self._memory: dict[int, tuple[int, memoryview]] = {}  # address and memory of each row
        self._every = 1
        self._due: int | None = None  # the step after which they are to be read
        self._fresh = True
        self._unknown: set[int] = set()  # rows of which nothing tells who holds copies
        self._wanted: set[int] = set()  # rows of which the reductions are to be learned
        self._moves = FirstMoves(())  # of rows that there may be more copies of than is known

    def install(self) -> None:
        """Write the table and the layout."""
        context = self.context
        if context.model is None:
            return
        self._tensors = model_tensors(context.model, context.replicas)
        self._every = period([t.tensor for t in self._tensors])
        self._due, self._fresh = None, True
        context.recorder.parameters(t.row for t in self._tensors)
        self._say_layout(find_layout(context.model, context.mesh))
        self._unknown = {row for row, t in enumerate(self._tensors) if _has_unknown_copies(t, context.world_size)}
        world = context.world_size
        self._moves = FirstMoves(
            row for row, t in enumerate(self._tensors) if t.tensor.numel() and _may_have_more_copies(t, world)
        )
        context.recorder.meta.add("process", moved_since={})
        trained = {row for row, t in enumerate(self._tensors) if t.tensor.requires_grad}
        # Where all are reduced over the same ranks, as under DDP, these read different data.
        alike = self._layout.kind == "plain" and not self._layout.data_ranks and context.world_size > 1
        self._wanted = trained if alike else trained & self._unknown
        if self._wanted and context.replicas is not None:
            context.reductions = Reductions(self._tensors, self._wanted, self._masters)

    def remove(self) -> None:
        """Let go of the model."""
        self._tensors = []
        self._memory = {}
        self.context.reductions, self.context.learned, self.context.reduced_elsewhere = None, {}, set()
        super().remove()

    def before_optimizer(self) -> None:
        """What the last step left, and at first what the model began with."""
        step = self.context.step
        if not self._tensors:
            return
        context = self.context
        reductions = context.reductions
        if reductions is not None and reductions.stepped(context.trained_by() - context.trained_by(context.stepping)):
            context.reductions = None
            self._learn(reductions.found(), reductions.within)
            if (other := reductions.found_otherwise()) is not None:
                name = self._tensors[other[1]].name
                context.recorder.meta.add("process", reduced_otherwise=[step, other[0], name])
        if self._fresh:
            self._fresh = False
            self._read(step - 1, None)
        elif self._due is not None and self._due < step:
            due, self._due = self._due, None
            self.context.progress.flush()  # the step's record is to be amended
            self._read(due, due)

    def after_optimizer(self) -> None:
        """On every K-th step."""
        self._due = self.context.step if self.context.step % self._every == 0 else None

    def _masters(self) -> dict[int, torch.Tensor]:
        """By row the tensor that an optimizer trains in the place of the model's, as one in FP32 for one in BF16.

        Known where the optimizer has as many of each shape as the model trains, in the same order.
        """
        rows: dict[torch.Size, list[int]] = {}
        for row, named in enumerate(self._tensors):
            if named.tensor.requires_grad:
                rows.setdefault(named.tensor.shape, []).append(row)
        mine = {id(named.tensor) for named in self._tensors}
        for optimizer in self.context.watched_optimizers().values():
            trained: dict[torch.Size, list[torch.Tensor]] = {}
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                trained.setdefault(parameter.shape, []).append(parameter)
            as_many = {shape: len(each) for shape, each in trained.items()} == {s: len(r) for s, r in rows.items()}
            if as_many and not any(id(p) in mine for each in trained.values() for p in each):
                return {row: p for shape, r in rows.items() for row, p in zip(r, trained[shape], strict=True)}
        return {}

    def _learn(self, copies: dict[int, tuple[int, ...]], within: set[int]) -> None:
        """Write the table again, with the ranks that were seen to hold copies, and the layout where that tells it.

        Gradients that an optimizer reduces `within` its step are not reduced when it begins.
        """
        self.context.reduced_elsewhere = {id(self._tensors[row].tensor) for row in copies.keys() & within}
        self.context.learned = {id(self._tensors[row].tensor): copies[row] for row in copies.keys() - within}
        rows = [t.row for t in self._tensors]
        for row in self._unknown & copies.keys():
            rows[row] = replace(rows[row], replica=replica_key(self._tensors[row].tensor, copies[row]))
        if rows != [t.row for t in self._tensors]:
            self.context.recorder.describe_parameters(rows)
        groups, layout = set(copies.values()), self._layout
        if layout.kind == "plain" and not layout.data_ranks and len(groups) == 1 and copies.keys() == self._wanted:
            (ranks,) = groups
            along = "data" if len(ranks) == self.context.world_size else layout.along
            self._say_layout(replace(layout, data_ranks=ranks, along=along))

    def _say_layout(self, layout: ParameterLayout) -> None:
        self._layout = layout
        self.context.recorder.meta.add("layout", **layout.to_json(), digest_every=self._every)
        self.context.progress.unnamed = dimension((layout.along,))

    def _read(self, step: int, amend: int | None) -> None:
        context = self.context
        if not any(named.tensor.numel() for named in self._tensors) or any(t.tensor.is_meta for t in self._tensors):
            return  # they are elsewhere between their uses, as with ZeRO-3 of DeepSpeed: nothing lies here to be read
        self._look_for_moves(step)
        values = np.zeros(len(self._tensors), np.uint64)
        late: list[int] = []
        for row, named in enumerate(self._tensors):
            tensor = named.tensor if type(named.tensor) is torch.nn.Parameter else local_tensor(named.tensor)
            if tensor.is_cpu:
                values[row] = self._host_digest(row, tensor)
            else:
                late.append(row)
        if not late:
            context.recorder.digests(step, values)
            if amend is not None:
                context.recorder.amend_step(amend, params_digest=_fold(values))
            return
        stacked = device_digests([local_tensor(self._tensors[row].tensor) for row in late])

        def arrived(found: npt.NDArray[Any]) -> bool:
            if amend is not None and not context.recorder.amend_step(amend, params_digest=0):
                return False
            values[late] = found.view(np.uint64)
            context.recorder.digests(step, values)
            if amend is not None:
                context.recorder.amend_step(amend, params_digest=_fold(values))
            return True

        self.late.put(stacked, arrived)

    def _look_for_moves(self, step: int) -> None:
        """Write down which parameters a gradient has moved; on a device that is known later."""
        rows = list(self._moves.resting)
        parts = [sample(local_tensor(self._tensors[row].tensor)) for row in rows]
        if not parts:
            return
        ends = np.cumsum([len(part) for part in parts])[:-1]
        stacked = torch.cat([part.to(parts[0].device, non_blocking=True) for part in parts])

        def arrived(found: npt.NDArray[Any]) -> None:
            new = [self._moves.add(step, row, own) for row, own in zip(rows, np.split(found, ends), strict=True)]
            if any(new):
                self.context.recorder.meta.add("process", moved_since=self._moves.since)

        if stacked.is_cpu:
            arrived(stacked.numpy())
        else:
            self.late.put(stacked, arrived)

    def _host_digest(self, row: int, tensor: torch.Tensor) -> int:
        """The digest of a row. The memory of contiguous tensors is remembered: finding it costs more than a hash."""
        known = self._memory.get(row)
        if known is None or known[0] != tensor.data_ptr() or known[1].nbytes != tensor.nbytes:
            if not tensor.is_contiguous():
                return host_digest(tensor)
            known = self._memory[row] = (tensor.data_ptr(), host_memory(words(tensor)).data)
        return xxhash.xxh3_64_intdigest(known[1])


def _has_unknown_copies(named: Named, world_size: int) -> bool:
    """Whether nothing tells who holds copies of a parameter; the mesh of a shard may be only a part of the world."""
    tensor, key = named.tensor, named.row.replica
    return not key or (
        isinstance(tensor, DTensor)
        and key.startswith(("mesh:1:", "copies:1:"))
        and tensor.device_mesh.size() < world_size
    )


def _may_have_more_copies(named: Named, world_size: int) -> bool:
    kind, _, rest = named.row.replica.partition(":")
    count = rest.partition(":")[0]
    few = kind == "copies" and count.isdigit() and int(count) < world_size
    return world_size > 1 and (few or _has_unknown_copies(named, world_size))


def _fold(values: npt.NDArray[np.uint64]) -> int:
    """One digest of all, never 0 (0 says that none was made)."""
    return xxhash.xxh3_64_intdigest(values.tobytes()) or 1
