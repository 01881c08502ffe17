"""The update audit: small windows of a parameter, its gradient and its moments around the optimizer's step.

They are copied when the optimizer begins, when it has stepped, and when it begins again: so it is known what it found,
what it made of that, and whether anything but it has written there since. The monitor computes the step again in FP64
(`detectors.silent.audit`). Of more than the window a sum of machine words is kept from when the optimizer has stepped
until it begins again: one bit that memory has flipped meanwhile changes it by a power of two. A look costs a few small
copies whatever the model's size; which tensors a step looks at follows from its number (`probes.rotation`), so ranks
look at the same ones.
"""

from __future__ import annotations

import math
import time
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from dtobs.probes.base import Probe
from dtobs.probes.layout import local_tensor, model_tensors
from dtobs.probes.rotation import Rotation, place
from dtobs.recording.laws import UPDATES, WINDOW, Update

KINDS: dict[type, str] = {torch.optim.AdamW: "adam", torch.optim.Adam: "adam", torch.optim.SGD: "sgd"}
"""Optimizers whose arithmetic is known; exactly these, a subclass may do something else."""
_MOMENTS = {"sgd": ("momentum_buffer", ""), "": ("exp_avg", "exp_avg_sq"), "adam": ("exp_avg", "exp_avg_sq")}
_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOST_ROWS = 4096
SUMMED = 1 << 14
"""Elements of one tensor of which the words are summed, unless everything is looked at."""


@dataclass
class _Row:
    name: str
    parameter: weakref.ref[torch.Tensor]
    group: int


@dataclass
class _Look:
    """One window: `before`, `after` and `rest` as in the ring, flat. `numbers` are lr to done of the record."""

    row: int
    step: int
    first: int
    count: int
    flags: int
    numbers: list[float | torch.Tensor]
    before: torch.Tensor
    after: torch.Tensor | None = None
    sums: torch.Tensor | None = None  # int64[3] of what was left
    summed: int = 0
    drift: Any = (0, 0, 0)


class UpdateProbe(Probe):
    """Writes the ring UPDATES and the ``law`` entry that explains its rows."""

    name = "updates"
    about_optimizer = True

    def __init__(self) -> None:
        super().__init__()
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._rows: list[_Row] = []
        self._rotation = Rotation(0)
        self._kind = ""
        self._step: int | None = None
        self._now: list[_Look] = []
        self._record = np.zeros((), UPDATES.dtype)

    def install(self) -> None:
        """List the parameters that the optimizer trains; the audit takes its samples from them."""
        context = self.context
        self._optimizer = context.optimizers[-1] if context.optimizers else None
        optimizer = self._audited()
        if optimizer is None:
            return
        others = [other for other in context.watched_optimizers().values() if other is not optimizer]
        elsewhere = set().union(*(context.trained_by(other) for other in others))
        named = model_tensors(context.model, context.replicas) if context.model is not None else []
        names = {id(each.tensor): each.name for each in named}
        for number, group in enumerate(optimizer.param_groups):
            for place_, parameter in enumerate(group["params"]):
                mine = parameter.dtype in _FLOATS and id(parameter) not in elsewhere
                if mine and len(self._rows) < _MOST_ROWS:
                    name = names.get(id(parameter), f"parameter {place_} of group {number}")
                    self._rows.append(_Row(name, weakref.ref(parameter), number))
        if not self._rows:
            return
        self._kind = KINDS.get(type(optimizer), "")
        self._rotation = Rotation(len(self._rows), everything=context.levels.get(self.name) == "all")
        dtypes = [
            str(p.dtype).removeprefix("torch.") if (p := row.parameter()) is not None else "" for row in self._rows
        ]
        context.recorder.meta.add(
            "law",
            name=UPDATES.name,
            since=context.step,
            kind=self._kind,
            rows=[row.name for row in self._rows],
            dtypes=dtypes,
        )
        let_go = self.guard(lambda: setattr(self, "_now", []))
        context.on_rewritten.append(let_go)
        self.undo.callback(context.on_rewritten.remove, let_go)

    def _audited(self) -> torch.optim.Optimizer | None:
        """Of several optimizers, the last; a parameter that others train as well is left out."""
        return self._optimizer() if self._optimizer is not None else None

    def remove(self) -> None:
        """Let go of everything; what the last step left is not read again."""
        self._rows, self._now, self._step = [], [], None
        super().remove()

    def before_optimizer(self) -> None:
        """See what became of the last step's windows, and open those of this one."""
        step = self.context.step
        if not self._rows or step == self._step or self.context.stepping is not self._audited():
            return  # another step of the optimizer within the same step
        begin = time.perf_counter_ns()
        for look in self._now:
            self._finish(look)
        self._now, self._step = [], step
        for number in self._rotation.rows(step):
            look_now = self._open(number, step)
            if look_now is not None:
                self._now.append(look_now)
        if self._now:
            self._rotation.spent(time.perf_counter_ns() - begin)

    def after_optimizer(self) -> None:
        """What the optimizer made of it."""
        if not self._now or self._now[0].after is not None or self.context.stepping is not self._audited():
            return
        begin = time.perf_counter_ns()
        for look in self._now:
            look.after = self._copy(look.row, look.first, look.count, gradient=False)
            look.sums, look.summed = self._sums(look)
            self._forget_if_changed(look)
        self._now = [look for look in self._now if look.after is not None]
        self._rotation.spent(time.perf_counter_ns() - begin)

    def _open(self, number: int, step: int) -> _Look | None:
        optimizer, row = self._audited(), self._rows[number]
        parameter = row.parameter()
        if optimizer is None or parameter is None or parameter.grad is None or row.group >= len(optimizer.param_groups):
            return None
        size = local_tensor(parameter).numel()
        count = min(WINDOW, size)
        first = place(step, size - count + 1)
        before = self._copy(number, first, count, gradient=True) if count else None
        if before is None:
            return None
        group = optimizer.param_groups[row.group]
        return _Look(number, step, first, count, _flags(group), self._numbers(group, parameter), before)

    def _numbers(self, group: dict[str, Any], parameter: torch.Tensor) -> list[float | torch.Tensor]:
        """Learning rate, weight decay, betas, eps, and the steps done: floats, or copies of what a device holds."""
        betas = group.get("betas", (group.get("momentum", math.nan), group.get("dampening", math.nan)))
        state = self._state(parameter)
        found: list[float | torch.Tensor] = []
        values = (
            group.get("lr"),
            group.get("weight_decay"),
            *betas[:2],
            group.get("eps"),
            state.get("step", 0.0 if self._kind == "adam" else None),
        )
        for value in values:
            if isinstance(value, torch.Tensor) and not value.is_cpu:
                found.append(value.detach().reshape(()).clone())
            else:
                found.append(float(value) if value is not None else math.nan)
        return found

    def _state(self, parameter: torch.Tensor) -> Any:
        optimizer = self._audited()
        return optimizer.state.get(parameter, {}) if optimizer is not None else {}

    def _copy(self, number: int, first: int, count: int, *, gradient: bool) -> torch.Tensor | None:
        """The window in the parameter, its gradient and its moments, one after the other; None where it has none."""
        parameter = self._rows[number].parameter()
        if parameter is None or self._audited() is None:
            return None
        held = local_tensor(parameter)
        if first + count > held.numel() or not _dense(held):
            return None
        state = self._state(parameter)
        moments = [state.get(name) for name in _MOMENTS[self._kind]]
        tensors = [held, parameter.grad, *moments] if gradient else [held, *moments]
        pieces: list[torch.Tensor] = []
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                pieces.append(held.new_full((count,), math.nan))
                continue
            if tensor.layout != torch.strided:
                return None
            values = tensor.data if type(tensor) is torch.Tensor else local_tensor(tensor)
            if values.stride() != held.stride() or values.device != held.device or values.dtype not in _FLOATS:
                return None  # quantized, offloaded or ordered otherwise: nothing that could be compared
            pieces.append(values.as_strided((count,), (1,), values.storage_offset() + first))
        return torch.cat(pieces)

    def _sums(self, look: _Look) -> tuple[torch.Tensor | None, int]:
        """int64[3]: the sums of the words of the parameter and its moments, and how many bytes of each they cover."""
        parameter = self._rows[look.row].parameter()
        if parameter is None:
            return None, 0
        held = local_tensor(parameter)
        state = self._state(parameter)
        found: list[torch.Tensor] = []
        covered = 0
        for tensor in (held, *(state.get(name) for name in _MOMENTS[self._kind])):
            values = local_tensor(tensor) if isinstance(tensor, torch.Tensor) else None
            if values is None or values.dtype != held.dtype or not values.is_contiguous() or values.shape != held.shape:
                found.append(torch.zeros((), dtype=torch.int64, device=held.device))
                continue
            flat = values.detach().view(-1)
            if len(flat) > SUMMED and not self._rotation.everything:
                flat = flat.narrow(0, place(look.step, len(flat) - SUMMED + 1), SUMMED)
            covered = flat.nbytes
            found.append(_sum_of_words(flat))
        return torch.stack(found), covered

    def _forget_if_changed(self, look: _Look) -> None:
        """A learning rate that another hook of the step has set: which one was used is not known."""
        optimizer = self._audited()
        groups = optimizer.param_groups if optimizer is not None else []
        group = self._rows[look.row].group
        now, then = groups[group].get("lr") if group < len(groups) else None, look.numbers[0]
        if isinstance(then, float) and (not isinstance(now, (int, float)) or now != then):
            look.numbers[0] = math.nan

    def _finish(self, look: _Look) -> None:
        """Read a window again and write it down."""
        rest = self._copy(look.row, look.first, look.count, gradient=False)
        if rest is None or look.after is None:
            return
        if look.sums is not None:
            sums, summed = self._sums(look)
            if sums is not None and summed == look.summed and sums.device == look.sums.device:
                drift = sums - look.sums
                if drift.is_cpu:
                    look.drift = drift.numpy()
                else:
                    self.late.put(drift, lambda values: setattr(look, "drift", values.copy()))
            else:
                look.summed = 0
        ring, record = self.context.recorder.law(UPDATES), self._record
        parts, count = [look.before, look.after, rest], look.count
        late = [n for n, number in enumerate(look.numbers) if isinstance(number, torch.Tensor)]
        parts += [number.to(rest.device).reshape(1) for number in look.numbers if isinstance(number, torch.Tensor)]

        def arrived(values: Any) -> bool:
            numbers = list(look.numbers)
            for n, place_ in enumerate(late):
                numbers[place_] = float(values[10 * count + n])
            record["step"], record["row"], record["first"] = look.step, look.row, look.first
            record["count"], record["flags"] = look.count, look.flags
            record["summed"], record["drift"] = look.summed, look.drift
            for name, number in zip(("lr", "weight_decay", "beta1", "beta2", "eps", "done"), numbers, strict=True):
                record[name] = number
            for name, begin, wide in (("before", 0, 4), ("after", 4, 3), ("rest", 7, 3)):
                windows = record[name].reshape(wide, WINDOW)
                windows[:, :count] = values[begin * count : (begin + wide) * count].reshape(wide, count)
                windows[:, count:] = math.nan
            ring.append(record)
            return True

        together = torch.cat(parts)
        if together.dtype == torch.bfloat16:  # numpy has none
            together = together.float()
        if together.is_cpu:
            arrived(together.numpy())
        else:
            self.late.put(together, arrived)


def _sum_of_words(flat: torch.Tensor) -> torch.Tensor:
    """int64 scalar: the sum, modulo 2**64, of the bytes taken eight at a time; what is left over counts by bytes."""
    whole = flat.numel() - flat.numel() % (8 // math.gcd(8, flat.element_size()))
    offset = flat.storage_offset() * flat.element_size() % 8
    if offset or not whole:  # not where a word begins
        flat = flat.clone()
    total = flat[:whole].view(torch.int64).sum() if whole else flat.new_zeros((), dtype=torch.int64)
    left = flat[whole:]
    if left.numel():
        total = total + left.view(_WORDS[left.element_size()]).to(torch.int64).sum()
    return total


def _flags(group: dict[str, Any]) -> int:
    return (
        Update.MAXIMIZE * bool(group.get("maximize"))
        | Update.NESTEROV * bool(group.get("nesterov"))
        | Update.DECOUPLED * bool(group.get("decoupled_weight_decay"))
        | Update.AMSGRAD * bool(group.get("amsgrad"))
    )


def _dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill their memory without a gap, in whatever order."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return not isinstance(tensor, DTensor) and reach == tensor.numel()
