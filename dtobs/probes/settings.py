"""How this rank is configured, for the comparison with its peers: written when first seen and when it changes.

Read just before the optimizer steps, on the host, from what torch and the user's objects say of themselves: no tensor
is touched, and a step in which nothing changed writes nothing. What a field means: `detectors.silent.config_mismatch`.
"""

from __future__ import annotations

import math
import os
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import xxhash
from torch import nn

from dtobs.probes.base import Context, Probe
from dtobs.probes.layout import common_groups, plain_parameters
from dtobs.probes.modules import around_call, roots, trains
from dtobs.words import count

PERIOD = 16
"""Modes, frozen parameters and dropout are read in every such step; hyperparameters in each."""
FIRST_STEPS = 4
VALIDATION_PASSES = 4
MOST_CHANGES = 200
MOST_GROUPS = 16
MOST_OPTIMIZERS = 4
MOST_NAMES = 4
SKIPPED = 4
"""Steps that an optimizer may leave out between two looks before it counts as gone back to an earlier state."""
_ENVIRONMENT = ("NCCL_ALGO", "NCCL_PROTO", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "PYTORCH_CUDA_ALLOC_CONF")
_TORCHS_NORMS = (nn.modules.batchnorm._BatchNorm.forward, nn.SyncBatchNorm.forward)
"""What other classes of batch norm do, such as those that synchronise by their own means, is not known."""
_BY_MODE = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
_MOST_SOURCE_BYTES = 4 << 20
Parameters = list[tuple[str, torch.Tensor]]
"""A model's, with their names."""


class _Counted(NamedTuple):
    """What an optimizer's state had counted at the last look, in the run's step `done`, and how fast it counts."""

    done: int
    counted: int
    rate: float  #: its steps a step of the run
    ahead: int


class Settings(Probe):
    """Writes ``settings`` entries: the step and the fields that have another value since the last one."""

    name = "settings"

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[str, str] = {}
        self._changes = 0
        self._looked = 0
        self._without = 0  # passes without gradients in training mode since the last step; -1 once they were told
        self._groups: dict[int, tuple[Any, ...]] = {}  # by the optimizer's number
        self._counted: dict[int, _Counted] = {}  # by its number
        self._ungraded: dict[int, set[int]] = {}  # by its number, ids of what has had no gradient at any look
        self._modules: list[weakref.ref[nn.Module]] = []
        self._autocast, self._clipped = "", ""

    def install(self) -> None:
        """Remember the modules whose behaviour depends on their mode."""
        self._looked, self._groups, self._ungraded, self._counted = 0, {}, {}, {}
        model = self.context.model
        self._modules = (
            [weakref.ref(m) for m in model.modules() if isinstance(m, _BY_MODE)] if model is not None else []
        )
        self._autocast, self._clipped = "", ""
        clipping = self.guard(self._clipping)
        self.context.on_clipping.append(clipping)
        self.undo.callback(self.context.on_clipping.remove, clipping)
        if model is not None:
            around_call(self, roots(model)[0], self._begin_forward, _ignore)

    def _begin_forward(self, root: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Autocast is on only while the model runs; and a validation may run in training mode."""
        if not torch.is_grad_enabled() and root.training and self._looked >= FIRST_STEPS and self._without >= 0:
            self._note_validation()
        if (self._looked < FIRST_STEPS or self.context.step % PERIOD == 0) and trains(root):
            device = next((p.device.type for p in root.parameters()), "cpu")
            on = torch.is_autocast_enabled(device)
            self._autocast = str(torch.get_autocast_dtype(device)).removeprefix("torch.") if on else "off"

    def _clipping(self, _parameters: Any, max_norm: Any) -> None:
        """Gradients are about to be clipped, or only measured where the norm has no bound."""
        if isinstance(max_norm, (int, float)) and math.isfinite(max_norm):
            now = f"to a norm of {max_norm:g}"
            self._clipped = now if self._clipped in ("", now) else "to several norms"

    def _note_validation(self) -> None:
        """A pass without gradients in training mode, after some steps; several in a row are likely a validation."""
        self._without += 1
        if self._without < VALIDATION_PASSES:
            return
        self._without = -1  # once is enough
        modules = [module for module in (reference() for reference in self._modules) if module is not None]
        noisy = sum(module.training and float(getattr(module, "p", 1.0)) > 0 for module in modules)
        if noisy:
            self.context.recorder.meta.add("process", validated_in_training_mode=[self.context.step, noisy])

    def before_optimizer(self) -> None:
        """Compare with what was written last; a few µs where nothing changed."""
        context = self.context
        self._without = min(self._without, 0)
        watched, stepping = context.optimizers[:MOST_OPTIMIZERS], context.stepping
        number = next((n for n, known in enumerate(watched) if known() is stepping), None)
        if stepping is None or number is None:
            return
        groups = _scalars(stepping)
        often = self._looked < FIRST_STEPS * len(watched) or context.step % PERIOD == 0
        if groups == self._groups.get(number) and not often:
            return
        fields = _hyperparameters(stepping, number, groups)
        fields["optimizer shares"] = "" if _trained(context.model) <= context.trained_by() else "a part"
        if often:
            named = list(plain_parameters(context.model)) if context.model is not None else []
            fields |= _without_an_optimizer(context, named) | self._without_a_gradient(number, stepping, named)
            first = number not in self._groups
            fields[f"{_called(number)} state"] = _state_at_first(stepping, named) if first else _state(stepping)
            fields |= self._steps_before(number, stepping)
            fields |= (_model(named, self._modules) if named else {}) | _arithmetic()
            fields |= {"autocast": self._autocast} if self._autocast else {}
            fields["gradient clipping"] = self._clipped or "none by clip_grad_norm_"
        if not self._looked:
            fields |= _process()
        self._groups[number] = groups
        self._looked += 1
        changed = {name: value for name, value in fields.items() if self._known.get(name) != value}
        if changed and self._changes < MOST_CHANGES:
            self._changes += 1
            self._known |= changed
            context.recorder.meta.add("settings", step=context.step, fields=changed)

    def _steps_before(self, number: int, stepping: torch.optim.Optimizer) -> dict[str, str]:
        """By how many steps its state is ahead of this run, as of when it was first seen or last went back."""
        now, done = _steps_counted(stepping), self.context.step - 1
        if now is None:
            return {}
        known = self._counted.setdefault(number, _Counted(done, now, 1.0, now - done))
        if done > known.done:
            went_back = now < known.counted + known.rate * (done - known.done) - SKIPPED
            rate = known.rate if went_back else (now - known.counted) / (done - known.done)
            known = self._counted[number] = _Counted(done, now, rate, now - done if went_back else known.ahead)
        return {f"{_called(number)}'s steps ahead of this run": str(known.ahead)}

    def _without_a_gradient(self, number: int, stepping: torch.optim.Optimizer, named: Parameters) -> dict[str, str]:
        """What `stepping` holds and trains, and that had no gradient at any look; empty while that still changes."""
        held = [p for group in common_groups(stepping) for p in group["params"] if p.numel()]  # of this rank's part
        now = {id(p) for p in held if p.requires_grad and p.grad is None}
        known = self._ungraded.get(number, now)
        self._ungraded[number] = known & now
        if known - now or self._looked <= FIRST_STEPS or not named:
            return {}
        ids = set().union(*self._ungraded.values())
        return {"parameters without a gradient": _listed([n for n, p in named if id(p) in ids])}


def _ignore(_: object) -> None:
    """What the forward returns is nothing to us."""


def _scalars(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """What the groups hold beside parameters and the learning rate, as far as it lies on the host."""
    return tuple(
        tuple((name, value) for name, value in group.items() if _plain(value) and name not in ("lr", "initial_lr"))
        for group in common_groups(optimizer)[:MOST_GROUPS]
    )


def _plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(item, (bool, int, float, str)) for item in value)
    return isinstance(value, (bool, int, float, str))


def _trained(model: nn.Module | None) -> set[int]:
    return {id(p) for p in model.parameters() if p.requires_grad} if model is not None else set()


def _without_an_optimizer(context: Context, named: Parameters) -> dict[str, str]:
    """The parameters that get gradients and that no optimizer holds; of these the ones that were made anew after it.

    Of the latter an optimizer holds as many tensors with their shapes, which get no gradient and are not in the model.
    """
    if not named:
        return {}
    parameters = {id(p): (name, p) for name, p in named}
    held = [p for each in context.watched_optimizers().values() for group in each.param_groups for p in group["params"]]
    stale = Counter(tuple(p.shape) for p in held if id(p) not in parameters and p.grad is None)
    known = set(map(id, held))
    replaced, without = [], []
    for number, (name, parameter) in parameters.items():
        if number in known or parameter.grad is None:
            continue
        without.append(name)
        shape = tuple(parameter.shape)
        if stale[shape] > 0:
            stale[shape] -= 1
            replaced.append(name)
    return {"replaced parameters": _listed(replaced), "parameters without an optimizer": _listed(without)}


def _listed(names: list[str]) -> str:
    """ "2 (a.weight, a.bias)"; empty where there are none."""
    return f"{len(names)} ({', '.join(names[:MOST_NAMES])}{', …' if len(names) > MOST_NAMES else ''})" if names else ""


def _called(number: int) -> str:
    return f"optimizer {number + 1}" if number else "optimizer"


def _state(optimizer: torch.optim.Optimizer) -> str:
    """ "kept" where it goes on from steps of its own, else "empty"."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    known = (_has_state(optimizer, parameter) for parameter in parameters)
    return "kept" if next((has for has in known if has is not None), False) else "empty"


def _state_at_first(optimizer: torch.optim.Optimizer, named: Parameters) -> str:
    """`_state`, or "kept by 3 of 8 parameters, not by NAME" where only some of those that have a gradient have any."""
    stepping = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    without = [p for p in stepping if not _has_state(optimizer, p)]
    if not without or len(without) == len(stepping):
        return _state(optimizer)
    name = next((name for name, p in named if p is without[0]), "one that the model does not have")
    return f"kept by {len(stepping) - len(without)} of {len(stepping)} parameters, not by {name}"


def _steps_counted(optimizer: torch.optim.Optimizer) -> int | None:
    """The most steps that its state has counted for a parameter; None where it has no count, or not on the host."""
    counts = []
    for state in optimizer.state.values():
        steps = state.get("step") if isinstance(state, dict) else None
        if isinstance(steps, torch.Tensor) and steps.device.type == "cpu" and steps.numel() == 1:
            steps = steps.item()
        if isinstance(steps, (int, float)):
            counts.append(int(steps))
    return max(counts, default=None)


def _has_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool | None:
    """Whether `parameter` goes on from steps it has taken; a count on the host may be zero before the first.

    None where the optimizer keeps nothing of it.
    """
    state = optimizer.state.get(parameter)
    steps = state.get("step") if isinstance(state, dict) else None
    if isinstance(steps, torch.Tensor) and steps.device.type == "cpu" and steps.numel() == 1:
        steps = steps.item()
    if isinstance(steps, (int, float)):
        return steps > 0
    return True if isinstance(state, dict) and any(value is not None for value in state.values()) else None


def _hyperparameters(optimizer: torch.optim.Optimizer, number: int, groups: tuple[Any, ...]) -> dict[str, str]:
    name_of_it = _called(number)
    of_it = f" of {name_of_it}" if number else ""
    fields = {name_of_it: type(optimizer).__name__}
    for place, group in enumerate(groups):
        for name, value in group:
            fields[f"{name_of_it}.{name}" + (f" of group {place}" if place else "")] = repr(value)
    rates = [group.get("lr") for group in common_groups(optimizer)[:MOST_GROUPS]]
    first = rates[0] if rates else None
    if isinstance(first, float) and first > 0:
        for place, rate in enumerate(rates[1:], 1):
            if isinstance(rate, float):
                fields[f"learning rate of group {place}{of_it} to that of group 0"] = f"{rate / first:.4g}"
    return fields


def _model(named: Parameters, modules: list[weakref.ref[nn.Module]]) -> dict[str, str]:
    trained = list(dict.fromkeys(name for name, parameter in named if parameter.requires_grad))
    kinds = Counter(parameter.dtype for parameter in {id(p): p for _, p in named}.values())
    fields = {
        "trained parameters": f"{len(trained)} ({_digest(' '.join(trained))})",
        "parameter dtypes": ", ".join(
            f"{number} x {kind}"
            for kind, number in sorted((str(k).removeprefix("torch."), n) for k, n in kinds.items())
        ),
    }
    alive = [module for module in (reference() for reference in modules) if module is not None]
    if alive:
        training = sum(module.training for module in alive)
        fields["dropout and batch-norm layers in training mode"] = f"{training} of {len(alive)}"
        norms = [module for module in alive if getattr(type(module), "forward", None) in _TORCHS_NORMS]
        if norms:
            together = sum(isinstance(module, nn.SyncBatchNorm) for module in norms)
            kind = "of all ranks" if together == len(norms) else "of each rank"
            kept = "" if any(module.training for module in norms) else " kept"
            fields["batch norm"] = f"{count(len(norms), 'layer')}, statistics {kind}{kept}"
        rates = sorted({float(getattr(module, "p", 0.0)) for module in alive if hasattr(module, "p")})
        if rates:
            fields["dropout"] = ", ".join(f"{rate:g}" for rate in rates)
    return fields


def _arithmetic() -> dict[str, str]:
    return {
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "default dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
    }


def _process() -> dict[str, str]:
    fields = {
        "torch": str(torch.__version__),
        "Python": ".".join(map(str, sys.version_info[:3])),
        **{name: os.environ.get(name, "") for name in _ENVIRONMENT},
    }
    sources = dict(_sources(sys.modules))
    if sources:
        fields["program"] = _digest(" ".join(f"{name}={sources[name]}" for name in sorted(sources)))
        main = Path(str(getattr(sys.modules.get("__main__"), "__file__", None) or "")).name
        fields["program's main file"] = main
    return fields


def _sources(modules: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and digest of the main file and of the modules beside it: the user's own program."""
    main = getattr(modules.get("__main__"), "__file__", None)
    if not main:
        return
    folder, left = str(Path(main).resolve().parent), _MOST_SOURCE_BYTES
    for name, module in list(modules.items()):
        # What lies there already: to ask a lazy module for anything, its dictionary included, imports it.
        there = object.__getattribute__(module, "__dict__") if isinstance(module, ModuleType) else {}
        file = there.get("__file__")
        # A Path for each of thousands of modules takes ten times as long.
        if name != "__main__" and (not file or os.path.dirname(str(file)) != folder):  # noqa: PTH120
            continue
        try:
            content = Path(file or main).read_bytes()
        except OSError:
            continue
        left -= len(content)
        if left < 0:
            return
        yield name, _digest(content)


def _digest(text: str | bytes) -> str:
    return f"{xxhash.xxh3_64_intdigest(text.encode() if isinstance(text, str) else text):016x}"[:8]
