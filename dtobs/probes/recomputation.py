"""Activations that a backward computes again: whether they come out as the forward had them.

``torch.utils.checkpoint`` keeps the inputs of a region and runs it once more in the backward. Where it draws other
random numbers then, or reads something that has changed, the gradients are those of a forward that never was. torch
compares shapes, types and devices of what the two save, not values.

In few steps, one region of the step is looked at: of each tensor that it saves for the backward (with
``use_reentrant=True``: of each that it returns) a window is kept and compared. Left out are buffers of the model, which
a region may well update each time (batch norm), and what holds few elements.

Private torch: ``torch.utils.checkpoint._CheckpointFrame`` with the fields used here, and ``_disable_current_modes``;
tried with 2.13. A version without them has only its regions with ``use_reentrant=True`` compared.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _python_dispatch
from torch.utils import checkpoint as private_torch

from dtobs.probes import patches
from dtobs.probes.base import Probe
from dtobs.probes.layout import local_tensor, module_name
from dtobs.probes.rotation import Rotation, place

TRIED = ("2.9.1", "2.10.0", "2.13.0", "2.14.1", "2.15.0")
LEAST, WINDOW = 64, 1024
"""Elements that a tensor must have to be looked at, and that are looked at."""
NOISE, APART = 1e-3, 0.02
"""Root mean square difference over root mean square: what is no difference, and what no order of additions explains.

The first tensor that is different counts: what is computed from it may be far off or near.
"""
MOST_SAID = 8
_FRAME: Any = getattr(private_torch, "_CheckpointFrame", None)
_WITHOUT_MODES: Any = getattr(_python_dispatch, "_disable_current_modes", None)
_FIELDS = ("metadata_fn", "weak_holders", "recomputed", "forward_completed")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.uint8)


class RecomputationProbe(Probe):
    """Writes ``recomputed`` entries: the steps and regions in which values came out otherwise."""

    name = "recomputation"

    def __init__(self) -> None:
        super().__init__()
        self._rotation = Rotation(0)
        self._looking = False
        self._regions, self._of_last_step = 0, 1
        self._buffers: set[int] | None = None  # of this step, once they are asked for
        self._kept: weakref.WeakKeyDictionary[Any, list[torch.Tensor | None]] = weakref.WeakKeyDictionary()
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._what: tuple[str, bool] = ("", True)  # the region, and whether it keeps the state of the generators
        self._said = 0

    def install(self) -> None:
        """Be told of each region and of each time that one is computed again."""
        if self.context.model is None:
            return
        self._rotation = Rotation(1)
        if _WITHOUT_MODES is not None and _frames_are_known():
            self.around(_FRAME, "__init__", _itself, self._chosen, self._is_next)
            self.around(_FRAME, "check_recomputed_tensors_match", self._again, _nothing, self._is_kept)
        chosen = self.guard(self._reentrant)

        def make(original: Callable[..., Any]) -> Any:
            def forward(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
                return original(ctx, chosen(function, args) or function, *args)

            return forward

        self.undo.callback(patches.replace(private_torch.CheckpointFunction, "forward", make))

    def remove(self) -> None:
        """Let go of everything."""
        self._pairs = []
        super().remove()

    def step_begin(self) -> None:
        """Choose whether a region of this step is looked at."""
        self._regions, self._of_last_step = 0, max(1, self._regions)
        self._pairs = []
        self._looking = self._said < MOST_SAID and bool(self._rotation.rows(self.context.step))
        self._buffers = None

    def step_end(self) -> None:
        """Compare what was computed twice."""
        if not self._pairs:
            return
        begin = time.perf_counter_ns()
        pairs, self._pairs = [pair for pair in self._pairs if pair[0].device == self._pairs[0][0].device], []
        step, (region, preserved) = self.context.step, self._what
        with torch.no_grad():
            rows = torch.stack([_difference(before, after) for before, after in pairs])

        def arrived(values: Any) -> None:
            shares = [(apart / whole) ** 0.5 if whole > 0 else float(apart > 0) for apart, whole in values.tolist()]
            first = next((share for share in shares if share > NOISE), 0.0)
            if first > APART:
                self._said += 1
                self.context.recorder.meta.add(
                    "recomputed", step=step, region=region, difference=float(first), preserved=preserved
                )

        if rows.is_cpu:
            arrived(rows)
        else:
            self.late.put(rows, arrived)
        self._rotation.spent(time.perf_counter_ns() - begin)

    def _is_next(self, *_args: Any) -> bool:
        """Count one more region; whether it is the one to look at. Called for each, unguarded."""
        self._regions += 1
        chosen = self._looking and self._regions - 1 == place(self.context.step, self._of_last_step)
        return chosen and not torch.compiler.is_compiling()

    def _is_kept(self, frame: Any, *_args: Any) -> bool:
        return frame in self._kept

    def _chosen(self, frame: Any) -> None:
        """Keep windows of what `frame` saves in the forward; torch asks for the metadata of each."""
        inside = _closure(frame.recompute_fn)
        self._what = self._name(inside.get("fn")), bool(inside.get("preserve_rng_state", True))
        metadata = frame.metadata_fn
        windows: list[torch.Tensor | None] = []
        if metadata is None:
            return
        keep, its_frame = self.guard(self._window), weakref.ref(frame)

        def noted(saved: torch.Tensor) -> Any:
            if (living := its_frame()) is not None and not living.forward_completed:
                windows.append(keep(saved))
            return metadata(saved)

        frame.metadata_fn = noted
        self._kept[frame] = windows

    def _again(self, frame: Any, task: int) -> None:
        """`frame` has been computed again, for the backward numbered `task`."""
        for known, before in zip(frame.weak_holders, self._kept.pop(frame, ()), strict=False):
            holder = known()
            handle = holder.handles.get(task) if holder is not None else None
            if before is not None and handle in frame.recomputed[task]:
                self._compare(before, self._window(frame.recomputed[task][handle]))

    def _reentrant(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any] | None:
        """`function` as it is to be run in the forward and again in the backward; None: as it is."""
        if not self._is_next():
            return None
        self._what = self._name(function), bool(args[:1] == (True,))
        keep, compare = self.guard(self._windows), self.guard(self._compare_all)
        before: list[torch.Tensor | None] = []

        def run(*inputs: Any) -> Any:
            result = function(*inputs)
            given = result if isinstance(result, tuple) else (result,)
            if not before:
                before.extend(keep(given) or [None])
            else:
                compare(before, given)
            return result

        return run

    def _compare_all(self, before: list[torch.Tensor | None], again: Iterable[Any]) -> None:
        for kept, now in zip(before, self._windows(again), strict=False):
            if kept is not None:
                self._compare(kept, now)

    def _compare(self, before: torch.Tensor, after: torch.Tensor | None) -> None:
        if after is not None and after.shape == before.shape and after.device == before.device:
            self._pairs.append((before, after))

    def _windows(self, values: Iterable[Any]) -> list[torch.Tensor | None]:
        return [self._window(value) if isinstance(value, torch.Tensor) else None for value in values]

    def _held_by_buffers(self) -> set[int]:
        """Addresses of the model's buffers."""
        if self._buffers is None:
            model = self.context.model
            self._buffers = (
                {buffer.data_ptr() for buffer in torch.nn.Module.buffers(model)} if model is not None else set()
            )
        return self._buffers

    def _window(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A copy of some elements, the same ones each time; None for what is not compared."""
        begin = time.perf_counter_ns()
        # A mode may keep what operators return, to give it back later.
        with (_WITHOUT_MODES or contextlib.nullcontext)(), torch.no_grad():
            held = local_tensor(tensor.detach())
            if type(held) is not torch.Tensor or held.dtype not in _DTYPES or held.numel() < LEAST:
                return None
            if held.layout is not torch.strided or held.data_ptr() in self._held_by_buffers():
                return None
            while held.dim() > 1 and held.numel() > 4 * WINDOW:
                held = held[0]
            copy = held.reshape(-1)[:WINDOW].clone()
        self._rotation.spent(time.perf_counter_ns() - begin)
        return copy

    def _name(self, function: Any) -> str:
        """What a region runs: a module by its name in the model, else where its code is."""
        owner = None
        while isinstance(function, functools.partial):  # of a method, perhaps, and the module given to it
            owner = next((each for each in function.args if isinstance(each, torch.nn.Module)), owner)
            function = function.func
        owner = getattr(function, "__self__", function) if owner is None else owner
        if isinstance(owner, torch.nn.Module) and self.context.model is not None:
            return module_name(self.context.model, owner)
        code = getattr(inspect.unwrap(function), "__code__", None)
        return f"{code.co_name} at {code.co_filename}:{code.co_firstlineno}" if code is not None else ""


def _frames_are_known() -> bool:
    """Whether this torch's frames are made and have the fields as here."""
    try:
        frame = _FRAME(None, True, None, None)
    except TypeError:  # another torch's, or none
        return False
    return all(hasattr(frame, field) for field in _FIELDS)


def _itself(frame: Any, *_args: Any, **_named: Any) -> Any:
    return frame


def _nothing(_: object) -> None:
    """There is nothing to end."""


def _closure(function: Any) -> dict[str, Any]:
    """The variables of the function around it that `function` uses, by name."""
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    found = {}
    for name, cell in zip(names, cells, strict=True):
        with contextlib.suppress(ValueError):  # it has no value
            found[name] = cell.cell_contents
    return found


def _difference(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """float64[2]: the sum of squares of the difference, and of what there was before."""
    was, is_now = before.double(), after.double()
    return torch.stack([(is_now - was).square().sum(), was.square().sum()])
