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
from collections import Counter
from dataclasses import dataclass
from itertools import chain
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
    """A parameter, and where the optimizer that trains it has it."""

    name: str
    parameter: weakref.ref[torch.Tensor]
    group: int
    number: int  #: of the optimizer
    optimizer: weakref.ref[torch.optim.Optimizer]
    kind: str


@dataclass(eq=False)
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
    moments: tuple[weakref.ref[torch.Tensor], ...] = ()  #: the optimizer's, as it found them
    drift: Any = (0, 0, 0)


class UpdateProbe(Probe):
    """Writes the ring UPDATES and the ``law`` entry that explains its rows."""

    name = "updates"
    about_optimizer = True

    def __init__(self) -> None:
        super().__init__()
        self._rows: list[_Row] = []
        self._rotation = Rotation(0)
        self._step: int | None = None
        self._chosen: list[int] = []  # rows to look at in this step
        self._stepped: set[int] = set()  # ids of the optimizers that have begun in this step
        self._now: list[_Look] = []
        self._record = np.zeros((), UPDATES.dtype)

    def install(self) -> None:
        """List the parameters that the optimizers train; one that several train is left out."""
        context = self.context
        watched = context.watched_optimizers()
        times = Counter(chain.from_iterable(map(context.trained_by, watched.values())))
        named = model_tensors(context.model, context.replicas) if context.model is not None else []
        names = {id(each.tensor): each.name for each in named}
        for number, optimizer in watched.items():
            kind, known = KINDS.get(type(optimizer), ""), weakref.ref(optimizer)
            of = f" of optimizer {number}" if len(watched) > 1 else ""
            for group, options in enumerate(optimizer.param_groups):
                for place_, parameter in enumerate(options["params"]):
                    if parameter.dtype in _FLOATS and times[id(parameter)] == 1 and len(self._rows) < _MOST_ROWS:
                        name = names.get(id(parameter), f"parameter {place_} of group {group}{of}")
                        self._rows.append(_Row(name, weakref.ref(parameter), group, number, known, kind))
        if not self._rows:
            return
        self._rotation = Rotation(len(self._rows), everything=context.levels.get(self.name) == "all")
        dtypes = [
            str(p.dtype).removeprefix("torch.") if (p := row.parameter()) is not None else "" for row in self._rows
        ]
        context.recorder.meta.add(
            "law",
            name=UPDATES.name,
            since=context.step,
            kinds={str(row.number): row.kind for row in self._rows},
            optimizers=[row.number for row in self._rows],
            rows=[row.name for row in self._rows],
            dtypes=dtypes,
        )
        let_go = self.guard(lambda: setattr(self, "_now", []))
        context.on_rewritten.append(let_go)
        self.undo.callback(context.on_rewritten.remove, let_go)

    def remove(self) -> None:
        """Let go of everything; what the last step left is not read again."""
        self._rows, self._now, self._chosen, self._step = [], [], [], None
        super().remove()

    def before_optimizer(self) -> None:
        """See what became of the last step's windows, and open those of this one."""
        stepping = self.context.stepping
        if not self._rows or stepping is None:
            return
        begin = time.perf_counter_ns()
        step = self.context.step
        if step != self._step:
            self._step, self._chosen = step, self._rotation.rows(step)
            self._stepped.clear()
        mine = self._of(stepping)
        chosen = [number for number in self._chosen if self._rows[number].optimizer() is stepping]
        if id(stepping) in self._stepped or not (mine or chosen):
            return  # another step of the optimizer within the same step, or nothing to look at
        self._stepped.add(id(stepping))
        for look in mine:
            self._finish(look)
            self._now.remove(look)
        opened = (self._open(number, step) for number in chosen)
        self._now += [look for look in opened if look is not None]
        self._rotation.spent(time.perf_counter_ns() - begin)

    def after_optimizer(self) -> None:
        """What the optimizer made of it."""
        stepping, begin = self.context.stepping, time.perf_counter_ns()
        begun = [look for look in self._of(stepping) if look.after is None]
        if not begun:
            return
        for look in begun:
            look.after = self._copy(look.row, look.first, look.count, gradient=False)
            look.sums, look.summed = self._sums(look)
            self._forget_if_changed(look)
            if look.after is None:
                self._now.remove(look)
        self._rotation.spent(time.perf_counter_ns() - begin)

    def _of(self, optimizer: torch.optim.Optimizer | None) -> list[_Look]:
        """The looks at what one optimizer trains."""
        return [look for look in self._now if self._rows[look.row].optimizer() is optimizer]

    def _open(self, number: int, step: int) -> _Look | None:
        row = self._rows[number]
        optimizer, parameter = row.optimizer(), row.parameter()
        if optimizer is None or parameter is None or parameter.grad is None or row.group >= len(optimizer.param_groups):
            return None
        size = local_tensor(parameter).numel()
        count = min(WINDOW, size)
        first = place(step, size - count + 1)
        before = self._copy(number, first, count, gradient=True) if count else None
        if before is None:
            return None
        group = optimizer.param_groups[row.group]
        moments = tuple(map(weakref.ref, _moments(row)))
        return _Look(number, step, first, count, _flags(group), self._numbers(row, group), before, moments=moments)

    def _numbers(self, row: _Row, group: dict[str, Any]) -> list[float | torch.Tensor]:
        """Learning rate, weight decay, betas, eps, and the steps done: floats, or copies of what a device holds."""
        betas = group.get("betas", (group.get("momentum", math.nan), group.get("dampening", math.nan)))
        state = _state(row)
        found: list[float | torch.Tensor] = []
        values = (
            group.get("lr"),
            group.get("weight_decay"),
            *betas[:2],
            group.get("eps"),
            state.get("step", 0.0 if row.kind == "adam" else None),
        )
        for value in values:
            if isinstance(value, torch.Tensor) and not value.is_cpu:
                found.append(value.detach().reshape(()).clone())
            else:  # Adafactor has two eps
                found.append(math.nan if value is None or isinstance(value, (tuple, list)) else float(value))
        return found

    def _copy(self, number: int, first: int, count: int, *, gradient: bool) -> torch.Tensor | None:
        """The window in the parameter, its gradient and its moments, one after the other; None where it has none."""
        row = self._rows[number]
        parameter = row.parameter()
        if parameter is None or row.optimizer() is None:
            return None
        held = local_tensor(parameter)
        if first + count > held.numel() or not _dense(held):
            return None
        state = _state(row)
        moments = [state.get(name) for name in _MOMENTS[row.kind]]
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
        row = self._rows[look.row]
        parameter = row.parameter()
        if parameter is None:
            return None, 0
        held = local_tensor(parameter)
        state = _state(row)
        found: list[torch.Tensor] = []
        covered = 0
        for tensor in (held, *(state.get(name) for name in _MOMENTS[row.kind])):
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
        """What another hook of the step has changed: which learning rate was used is not known, nor from which moments.

        torchft's LocalSGD loads in such a hook what a peer has, with moments of that peer.
        """
        row = self._rows[look.row]
        optimizer, group = row.optimizer(), row.group
        groups = optimizer.param_groups if optimizer is not None else []
        now, then = groups[group].get("lr") if group < len(groups) else None, look.numbers[0]
        if isinstance(then, float) and (not isinstance(now, (int, float)) or now != then):
            look.numbers[0] = math.nan
        step, done = _state(row).get("step"), look.numbers[-1]
        counted = isinstance(done, float) and isinstance(step, torch.Tensor) and step.is_cpu
        others = any(then() is not now for then, now in zip(look.moments, _moments(row), strict=False))
        if others or (counted and float(step) != done + 1):
            look.numbers[:4] = [math.nan] * 4

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


def _state(row: _Row) -> Any:
    """What the optimizer keeps of the row's parameter."""
    optimizer, parameter = row.optimizer(), row.parameter()
    return optimizer.state.get(parameter, {}) if optimizer is not None and parameter is not None else {}


def _moments(row: _Row) -> list[torch.Tensor]:
    """Those of the row's moments that there are."""
    state = _state(row)
    return [moment for name in _MOMENTS[row.kind] if isinstance(moment := state.get(name), torch.Tensor)]


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
