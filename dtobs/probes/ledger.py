"""The gradient ledger: what each rank added to a gradient, and what the optimizer was given of it.

Both are linear sketches (`probes.sketches`) of a few rows a step, the same on all ranks (`probes.rotation`). What a
rank adds is read before AccumulateGrad adds it, so before DDP or FSDP2 reduces anything, and a gradient that is only
computed (``torch.autograd.grad``) does not count. The hooks exist while a backward runs and at no other time: a step
without a look pays for one comparison, and nothing of the model is kept alive.

Where nothing says which ranks share a gradient, or it is never accumulated, there is no ledger, and ``probe`` entries
say why.
"""

from __future__ import annotations

import math
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dtobs.probes.backward import compiled_autograd
from dtobs.probes.base import Context, Probe
from dtobs.probes.flat import Flat, accumulator, flat_parameters
from dtobs.probes.fsdp import Gathered, fsdp_shards
from dtobs.probes.layout import Named, is_partial, local_tensor, model_tensors, wrappers
from dtobs.probes.megatron import MegatronGroups, megatron_groups
from dtobs.probes.rotation import Rotation
from dtobs.probes.sketches import Window, fine_share, sketch, sketch_shard, window
from dtobs.recording.laws import LEDGER, SKETCHES, Ledger, Side

COLUMNS = 16
"""Backwards of a step with a column of their own; those after that share the last one."""


@dataclass
class LedgerRow:
    """One parameter of the ledger. `ranks` are those whose gradients the optimizer should be given together."""

    name: str
    parameter: weakref.ref[torch.Tensor]
    ranks: tuple[int, ...]
    gathered: Gathered | None = None
    ddp: weakref.ref[DistributedDataParallel] | None = None
    ignored: bool = False  #: DDP was told to leave it alone
    learned: bool = False  #: from what was reduced in the first steps
    shape: tuple[int, ...] = ()  #: of the gradient as autograd sees it, on this rank
    held: weakref.ref[torch.Tensor] | None = None  #: what an optimizer holds in its place, where it does

    @property
    def parts(self) -> int:
        """In how many shards the optimizers hold it."""
        return self.gathered.parts if self.gathered is not None else 1

    def optimized(self) -> torch.Tensor | None:
        """What an optimizer holds of it; None where that is gone."""
        return (self.held or self.parameter)()


@dataclass
class _Look:
    """What was seen of one row in the step in progress."""

    at: Window
    local: list[torch.Tensor] = field(default_factory=list)  # by column, [parts, 1 + SKETCHES]
    fine: torch.Tensor | None = None  # of the last of them
    held_back: bool = False
    along: frozenset[int] = frozenset()
    bad: bool = False
    version: int = -1  #: of the parameter at the last backward, as autograd counts its changes


_Written = tuple[int, Side, int, int, int, torch.Tensor]
"""Row, side, micro-batch, part and flags of a record, and what was measured."""


class LedgerProbe(Probe):
    """Writes the ring LEDGER and the ``law`` entry that explains its rows."""

    name = "ledger"
    about_optimizer = True

    def __init__(self) -> None:
        super().__init__()
        self._rows: list[LedgerRow] = []
        self._rotation = Rotation(0)
        self._now: dict[int, _Look] = {}
        self._handles: list[Any] = []
        self._step, self._compiled_said, self._searches = 0, False, False
        self._awaits_said = False
        self._read: tuple[list[_Written], list[torch.Tensor | None]] = ([], [])  # by the optimizer's step in progress
        self._learned: dict[int, tuple[int, ...]] = {}
        self._follows = False  # gradients, of whichever rows
        self._record = np.zeros((), LEDGER.dtype)

    def install(self) -> None:
        """Find out which ranks share the gradient of each parameter."""
        context = self.context
        if context.model is None:
            return
        if not context.watched_optimizers():
            self._off("no optimizer was given, so nothing says what becomes of a gradient", "no optimizer")
            return
        self.backward_end()
        self._rows, self._follows = [], True
        self._list_rows()
        inputs = self.guard(self._inputs)
        context.on_inputs.append(inputs)
        self.undo.callback(context.on_inputs.remove, inputs)
        split = self.guard(self._weights_made_apart)
        context.on_split_backward.append(split)
        self.undo.callback(context.on_split_backward.remove, split)

    def _list_rows(self) -> None:
        """Write down which gradients are followed; again when it was learned who shares them."""
        context = self.context
        self._learned = context.learned
        rows, unknown = find_rows(context)
        untold = [named for named in unknown if id(named.tensor) not in context.reduced_elsewhere]
        if untold:
            self._off(f"nothing says which ranks share the gradient of {_first_of(untold)}")
        elif unknown:
            self._off(
                f"the gradient of {_first_of(unknown)} is reduced in a buffer or a copy, in the optimizer's step, or"
                " to one rank, and is not whole where this rank's optimizer begins",
                "reduced elsewhere",
            )
        elif self._learned:
            context.recorder.meta.add("probe", name=self.name, state="on", reason="learned from all-reduces")
        if self._rows and [(row.name, row.ranks) for row in rows] == [(row.name, row.ranks) for row in self._rows]:
            return
        self._rows = rows
        self._now, self._rotation = {}, Rotation(0)  # of rows that may not be there any more
        if not self._rows:
            return
        everything = context.levels.get(self.name) == "all"
        self._rotation = Rotation(len(self._rows), everything=everything)
        sets = list(dict.fromkeys(row.ranks for row in self._rows))
        context.recorder.meta.add(
            "law",
            name=LEDGER.name,
            since=context.step,
            rows=[row.name for row in self._rows],
            sets=sets,
            of=[sets.index(row.ranks) for row in self._rows],
            ignored=[n for n, row in enumerate(self._rows) if row.ignored],
        )

    def remove(self) -> None:
        """Let go of everything."""
        self.backward_end()
        self._rows, self._now, self._follows, self._read = [], {}, False, ([], [])
        super().remove()

    def step_begin(self) -> None:
        """Choose the rows of this step."""
        if self._learned is not self.context.learned and self._follows:
            self._list_rows()
        self._step = self.context.step
        self._now, self._searches = {}, False
        for number in self._rotation.rows(self._step):
            row = self._rows[number]
            self._now[number] = _Look(window(row.shape, row.parts, self._step))

    def _inputs(self, tensors: list[torch.Tensor]) -> None:
        self._searches = self._searches or any(tensor.requires_grad for tensor in tensors)

    def _weights_made_apart(self, _: nn.Module) -> None:
        """A pipeline makes weight gradients apart, past AccumulateGrad: what a rank adds cannot be seen."""
        if self._rows:
            self._off("the pipeline's schedule adds weight gradients past autograd", "split backward")
            self._rows, self._now, self._rotation = [], {}, Rotation(0)
        self._follows = False

    def backward_begin(self, tensors: Any) -> None:
        """Listen to what this backward adds to the rows of the step."""
        if not self._now:
            return
        begin = time.perf_counter_ns()
        compiled = compiled_autograd()  # a hook would be traced
        for number, look in self._now.items():
            row = self._rows[number]
            held = row.parameter()
            parameter = row.gathered.find() if row.gathered is not None else held
            if held is not None:
                # What is written through `to_local()` counts on the shard, and not on the DTensor around it.
                version = held._version + local_tensor(held)._version
                self._searches = self._searches or look.version not in (-1, version)
                look.version = version
            ddp = row.ddp() if row.ddp is not None else None
            look.held_back = ddp is not None and not ddp.require_backward_grad_sync
            if compiled and not self._compiled_said:
                self._compiled_said = True
                self._off("the backward is compiled, and hooks in it would be traced", "compiled backward")
            if compiled or parameter is None or not parameter.requires_grad or not parameter.is_leaf:
                look.bad = True
                continue
            look.along = row.gathered.along if row.gathered is not None else frozenset()
            node = accumulator(parameter) or torch.autograd.graph.get_gradient_edge(parameter).node
            # The handle knows the node only weakly, and the node keeps the parameter alive: both go when it returns.
            self._handles.append((node, node.register_prehook(self.guard(self._reader(look)))))
        self._rotation.spent(time.perf_counter_ns() - begin)

    def backward_end(self) -> None:
        """Stop listening."""
        while self._handles:
            self._handles.pop()[1].remove()

    def before_optimizer(self) -> None:
        """All has been added and reduced: read what came out."""
        if not self._now:
            return
        begin = time.perf_counter_ns()
        if self.context.stepping in self.context.awaiting:
            self._now = {}
            return
        mine = self.context.trained_by(self.context.stepping)
        now = {n: look for n, look in self._now.items() if id(self._rows[n].optimized()) in mine}
        for number in now:
            del self._now[number]  # a second step of the same optimizer in the same step is not looked at
        written: list[_Written] = []
        fine: list[torch.Tensor | None] = []
        for number, look in now.items():
            final = self._final(self._rows[number], look)
            if final is None or look.bad:
                continue
            for micro, values in enumerate(look.local):
                for n, part in enumerate(look.at.parts):
                    written.append((number, Side.LOCAL, micro, part, 0, values[n]))
                    fine.append(look.fine)
            part = self._part(self._rows[number])
            written.append((number, Side.FINAL, 0, part, self._flags(self._rows[number], look), final[0]))
            fine.append(None)
        self._read = (written, fine)
        self._rotation.spent(time.perf_counter_ns() - begin)

    def after_optimizer(self) -> None:
        """Write down what was added and what came out, unless the optimizer waited in its step for what comes out."""
        (written, fine), self._read = self._read, ([], [])
        if not written:
            return
        if self.context.stepping not in self.context.awaiting:
            begin = time.perf_counter_ns()
            self._write(written, fine)
            self._rotation.spent(time.perf_counter_ns() - begin)
        elif not self._awaits_said:
            self._awaits_said = True
            self._off("the optimizer waits in its own step for the reductions of its gradients", "reduced in the step")

    def _reader(self, look: _Look) -> Any:
        def read(gradients: tuple[torch.Tensor | None, ...]) -> None:
            begin = time.perf_counter_ns()
            gradient = gradients[0]
            if gradient is None:
                return
            if is_partial(gradient, look.along) or gradient.is_sparse or not gradient.is_floating_point():
                look.bad = True  # a sum that is still to be made over other ranks, or nothing to sketch
                return
            values = local_tensor(gradient)
            with torch.no_grad():
                found = sketch(values, look.at)
                look.fine = fine_share(values)
            if len(look.local) < COLUMNS:
                look.local.append(found)
            else:
                last = look.local[-1]
                last[:, 1:] += found[:, 1:]
                last[:, 0] = torch.hypot(last[:, 0], found[:, 0])
            self._rotation.spent(time.perf_counter_ns() - begin)

        return read

    def _final(self, row: LedgerRow, look: _Look) -> torch.Tensor | None:
        parameter = row.parameter()
        gradient = parameter.grad if parameter is not None else None
        if gradient is None or is_partial(gradient) or gradient.is_sparse or not gradient.is_floating_point():
            return None
        if self._part(row) not in look.at.parts:  # not this shard's turn; the others need not wait for us
            return torch.full((1, 1 + SKETCHES), float("nan"), device=local_tensor(gradient).device)
        values = local_tensor(gradient)
        with torch.no_grad():
            return sketch_shard(values, look.at) if row.gathered is not None else sketch(values, look.at)

    def _part(self, row: LedgerRow) -> int:
        return row.gathered.part if row.gathered is not None else 0

    def _flags(self, row: LedgerRow, look: _Look) -> int:
        ddp = row.ddp() if row.ddp is not None else None
        held_back = look.held_back or (row.gathered is not None and row.gathered.waits())
        flags = (Ledger.HELD_BACK if held_back else 0) | (Ledger.SEARCHES if self._searches else 0)
        flags |= Ledger.LEARNED if row.learned else 0
        return flags | (Ledger.CUSTOM_HOOK if getattr(ddp, "_comm_hooks", None) else 0)

    def _write(self, written: list[_Written], fine: list[torch.Tensor | None]) -> None:
        step, ring, record = self._step, self.context.recorder.law(LEDGER), self._record

        def arrived(values: Any) -> bool:
            for (row, side, micro, part, flags, _), found in zip(written, values, strict=True):
                record["step"], record["row"], record["side"], record["micro"] = step, row, side, micro
                record["part"], record["flags"] = part, flags
                record["scale"], record["value"], record["fine"] = found[0], found[1:-1], found[-1]
                ring.append(record)
            return True

        device = next((w[-1].device for w in written if not w[-1].is_cpu), None)
        if device is None:
            shares = [math.nan if share is None else share.item() for share in fine]
            arrived([[*values.tolist(), share] for (*_, values), share in zip(written, shares, strict=True)])
        else:
            numbers = torch.stack([values.to(device) for *_, values in written])
            unknown = numbers.new_full((), math.nan)
            shares_late = torch.stack([unknown if share is None else share.to(device) for share in fine])
            self.late.put(torch.cat([numbers, shares_late[:, None]], 1), arrived)

    def _off(self, reason: str, short: str = "") -> None:
        self.context.recorder.meta.add("probe", name=self.name, state="off", reason=reason, short=short)


def _first_of(unknown: list[Named]) -> str:
    return unknown[0].name + (f" and {len(unknown) - 1} more" if len(unknown) > 1 else "")


def find_rows(context: Context) -> tuple[list[LedgerRow], list[Named]]:
    """The rows of a ledger, and the trained parameters of which nothing says who shares their gradient."""
    model, trained = context.model, context.trained_by()
    assert model is not None
    shards = fsdp_shards(model)
    inside = {id(p): ddp for ddp in reversed(wrappers(model)) for p in ddp.parameters()}
    rows: list[LedgerRow] = []
    unknown: list[Named] = []
    flats = {id(p): flat for flat in flat_parameters(model) for p in flat.held}
    megatron = megatron_groups(model)
    for named in model_tensors(model, context.replicas):
        tensor = named.tensor
        if not tensor.requires_grad or id(tensor) not in trained or not isinstance(tensor, nn.Parameter):
            continue
        flat = flats.get(id(tensor))
        if flat is not None and flat.held[0] is not tensor:
            continue  # one row for all that lies in it
        row = (
            _row(named, shards, inside, context, megatron)
            if flat is None
            else _flat_row(flat, shards[id(flat.parameter)])
        )
        if row is None:
            unknown.append(named)
        else:
            rows.append(row)
    return rows, unknown


def _flat_row(flat: Flat, gathered: Gathered | None) -> LedgerRow:
    name = f"{flat.name}.*" if flat.name else "*"
    whole: weakref.ref[torch.Tensor] = weakref.ref(flat.parameter)
    held: weakref.ref[torch.Tensor] = weakref.ref(flat.held[0])
    return LedgerRow(name, whole, flat.ranks, gathered if flat.parts > 1 else None, shape=(flat.length,), held=held)


def _row(
    named: Named,
    shards: dict[int, Gathered | None],
    inside: dict[int, DistributedDataParallel],
    context: Context,
    megatron: MegatronGroups | None,
) -> LedgerRow | None:
    tensor, kept = named.tensor, weakref.ref(named.tensor)
    if id(tensor) in shards:
        gathered = shards[id(tensor)]
        if gathered is None:
            return None
        return LedgerRow(named.name, kept, gathered.ranks, gathered, shape=gathered.shape)
    shape = tuple(local_tensor(tensor).shape)
    if id(tensor) in inside:
        ddp = inside[id(tensor)]
        ranks = tuple(dist.get_process_group_ranks(ddp.process_group))
        ignored = named.name in {n.removeprefix("module.") for n in getattr(ddp, "parameters_to_ignore", ())}
        return LedgerRow(named.name, kept, ranks, None, weakref.ref(ddp), ignored, shape=shape)
    if context.world_size == 1:
        return LedgerRow(named.name, kept, (0,), shape=shape)
    if isinstance(context.replicas, dist.ProcessGroup):
        return LedgerRow(named.name, kept, tuple(dist.get_process_group_ranks(context.replicas)), shape=shape)
    if megatron is not None:
        return LedgerRow(named.name, kept, megatron.copies(tensor), shape=shape)
    if id(tensor) in context.learned:
        return LedgerRow(named.name, kept, context.learned[id(tensor)], learned=True, shape=shape)
    if isinstance(tensor, DTensor):
        return LedgerRow(named.name, kept, (context.rank,), shape=shape)
    return None
