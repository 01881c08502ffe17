"""Where two runs part, and why: the first step, the first quantity, the first parameter.

Rounding makes runs of different layouts part as well, but slowly: a difference grows from step to step. What this file
calls apart has left what the steps before let expect (`JUMP`) and what the precision explains (`_tolerance`). What must
be exact (learning rate, tokens, the weight of the losses, settings, samples) needs neither.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dtobs.compare.job import ComparedJob, Floats, Sketch
from dtobs.detectors.silent.config_mismatch import CLIPPING
from dtobs.errors import TargetError
from dtobs.findings import Confidence
from dtobs.words import count

JUMP = 8.0
"""A difference this many times the largest one before is no growth of rounding any more."""
EXACT = 1e-6
LOW_PRECISION, FULL_PRECISION = 2e-2, 2e-4
"""Relative differences of a norm or a loss that the order of sums explains in one step."""
_LOW = ("bfloat16", "float16", "float8")
_MUST_AGREE = ("tokens a step", "weight of the losses", "learning rate")
_EFFECTS = ("gradient norm", "loss")
_PRECISION = ("parameter dtypes", "default dtype", "float32 matmul precision", "autocast", "NVIDIA_TF32_OVERRIDE")
_MODES = ("dropout and batch-norm layers in training mode", "dropout", "batch norm", "trained parameters")
_LEAST_SCALED = 1.5
"""Effective batches this many times apart want another learning rate."""
_WHOLE = 0.02
"""A factor this near to a whole number, or to one over it, is that."""


@dataclass(frozen=True)
class Difference:
    """Something that is not the same in A and B, from `step` on."""

    what: str
    step: int
    a: str
    b: str
    summary: str
    possible: bool = False  #: it may be without effect
    effect: bool = False  #: it is what comes of a difference

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON."""
        return {"what": self.what, "step": self.step, "a": self.a, "b": self.b, "summary": self.summary}


@dataclass(frozen=True)
class Quantity:
    """One series held against the other. `apart` is the first step in which they part beyond rounding."""

    name: str
    steps: int  #: in which both have it
    apart: int | None
    largest: float  #: relative difference
    largest_step: int
    a: Floats
    b: Floats

    def to_json(self) -> dict[str, Any]:
        """The figures without the series."""
        return {"steps": self.steps, "apart": self.apart, "largest": self.largest, "largest_step": self.largest_step}


@dataclass(frozen=True)
class Comparison:
    """The verdict: "same", "parts" or "unclear" (too little in common to tell)."""

    a: ComparedJob
    b: ComparedJob
    steps: list[int]
    quantities: list[Quantity]
    causes: list[Difference]
    verdict: str
    first: Difference | None
    summary: str
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """``dtobs.compare/1``."""
        return {
            "schema": "dtobs.compare/1",
            "a": {"target": self.a.name, "ranks": self.a.world, "data_ranks": self.a.data_ranks},
            "b": {"target": self.b.name, "ranks": self.b.world, "data_ranks": self.b.data_ranks},
            "steps": [self.steps[0], self.steps[-1]],
            "verdict": self.verdict,
            "summary": self.summary,
            "first": self.first.to_json() if self.first else None,
            "causes": [cause.to_json() for cause in self.causes],
            "quantities": {quantity.name: quantity.to_json() for quantity in self.quantities},
            "notes": self.notes,
        }


def compare(a: ComparedJob, b: ComparedJob) -> Comparison:
    """Hold B against A over the steps that both recorded. Raises TargetError when there is none."""
    steps = np.intersect1d(a.steps, b.steps)
    if not len(steps):
        raise TargetError(
            f"{a.name} recorded steps {a.steps[0]} to {a.steps[-1]} and {b.name} steps {b.steps[0]} to {b.steps[-1]}:"
            " they have none in common"
        )
    numbers = [int(step) for step in steps]
    tolerance = _tolerance(a, b, numbers[0])
    quantities = [
        found
        for name in (*_MUST_AGREE, *_EFFECTS)
        if (found := _quantity(name, a, b, numbers, EXACT if name in _MUST_AGREE else tolerance)) is not None
    ]
    by_name = {quantity.name: quantity for quantity in quantities}
    causes = [
        *_began(a, b, numbers),
        *_settings(a, b, numbers),
        *_faults(a, b, numbers),
        *(d for name in _MUST_AGREE if name in by_name and (d := _exact(by_name[name], a, b, numbers)) is not None),
        *_not_scaled(by_name, a, b),
        *_inputs(a, b, numbers),
        *_batch_norm(a, b, numbers[0]),
        *_gradients(a, b, numbers, tolerance),
    ]
    causes.sort(key=lambda cause: (cause.possible, cause.step))
    effects = [_effect(by_name[name], numbers) for name in _EFFECTS if name in by_name]
    apart = [cause for cause in causes if cause.effect] + [e for e in effects if e is not None]
    apart.sort(key=lambda e: e.step)
    return _verdict(a, b, numbers, quantities, causes, apart)


def _verdict(
    a: ComparedJob,
    b: ComparedJob,
    steps: list[int],
    quantities: list[Quantity],
    causes: list[Difference],
    effects: list[Difference],
) -> Comparison:
    sure = [cause for cause in causes if not (cause.possible or cause.effect)]
    notes = _notes(a, b, steps)
    seen = [quantity for quantity in quantities if quantity.name in _EFFECTS and quantity.steps]
    if sure or effects:
        first = min([*sure, *effects[:1]], key=lambda d: d.step)
        where = f"the runs part in step {first.step}: {first.summary}"
        if not sure:
            may = [cause for cause in causes if cause.possible and cause.step <= first.step]
            where += f"; possibly because {may[0].summary}" if may else ", and nothing that was recorded explains it"
        elif effects and effects[0] is not first:
            seen_in = next((effect for effect in effects if not effect.effect), effects[0])
            where += f"; {seen_in.summary} from step {seen_in.step} on"
        return Comparison(a, b, steps, quantities, causes, "parts", first, where, notes)
    equal = _bitwise(a, b, steps)
    if equal:
        text = f"the runs are the same to the bit in {count(equal, 'step')} that both read"
        return Comparison(a, b, steps, quantities, causes, "same", None, text, notes)
    if not seen:
        text = "neither a loss nor a gradient norm is known of both runs, so nothing can be told"
        return Comparison(a, b, steps, quantities, causes, "unclear", None, text, notes)
    largest = max(seen, key=lambda quantity: quantity.largest)
    text = (
        f"the runs are the same beyond rounding in {count(len(steps), 'step')}: "
        f"{largest.name} differs by {largest.largest:.1e} at most (step {largest.largest_step})"
    )
    return Comparison(a, b, steps, quantities, causes, "same", None, text, notes)


def figure(value: float) -> str:
    """``8,192``, ``0.001``, ``1.234``: whole numbers as they are, others with four digits."""
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e12 else f"{value:.4g}"


def _tolerance(a: ComparedJob, b: ComparedJob, step: int) -> float:
    fields = {**a.settings_at(step), **{f"B {name}": value for name, value in b.settings_at(step).items()}}
    low = any(kind in value for value in fields.values() for kind in _LOW)
    return LOW_PRECISION if low else FULL_PRECISION


def _quantity(name: str, a: ComparedJob, b: ComparedJob, steps: list[int], tolerance: float) -> Quantity | None:
    left = a.values[name][np.searchsorted(a.steps, steps)]
    right = b.values[name][np.searchsorted(b.steps, steps)]
    both = np.isfinite(left) & np.isfinite(right)
    one = np.isfinite(left) ^ np.isfinite(right)
    if not both.any():
        return None
    apart = np.zeros(len(steps))
    size = np.maximum(np.abs(left[both]), np.abs(right[both]))
    apart[both] = np.abs(left[both] - right[both]) / np.maximum(size, np.finfo(float).tiny)
    if name in _EFFECTS:  # one of them is no number any more, and the other is
        apart[one & both.any()] = np.where(_began_finite(left, right, one), np.inf, 0.0)[one]
    before = np.maximum.accumulate(np.concatenate([[0.0], apart[:-1]]))
    jumps = (apart > tolerance) & (apart > JUMP * before if name in _EFFECTS else apart > 0)
    first = int(np.flatnonzero(jumps)[0]) if jumps.any() else None
    at = int(np.argmax(apart))
    return Quantity(
        name,
        int(both.sum()),
        steps[first] if first is not None else None,
        float(min(apart[at], 1e9)),
        steps[at],
        left,
        right,
    )


def _began_finite(left: Floats, right: Floats, one: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Where exactly one of them is missing although it was known in the step before."""
    known = np.isfinite(left) & np.isfinite(right)
    before: npt.NDArray[np.bool_] = np.roll(known, 1)
    before[0] = False
    return np.logical_and(one, before)


def _exact(quantity: Quantity, a: ComparedJob, b: ComparedJob, steps: list[int]) -> Difference | None:
    if quantity.apart is None:
        return None
    at = steps.index(quantity.apart)
    left, right = float(quantity.a[at]), float(quantity.b[at])
    factor = _factor(right / left if left else float("inf"), a, b)
    said = {
        "tokens a step": f"B trains on {figure(right)} tokens a step and A on {figure(left)}{factor}: the"
        " effective batch differs",
        "weight of the losses": f"the losses of a step weigh {figure(right)} together in B and"
        f" {figure(left)} in A{factor}: the gradient is that much larger or smaller",
        "learning rate": f"the learning rate is {figure(right)} in B and {figure(left)} in A{factor}",
    }[quantity.name]
    return Difference(quantity.name, quantity.apart, figure(left), figure(right), said)


def _not_scaled(by_name: dict[str, Quantity], a: ComparedJob, b: ComparedJob) -> list[Difference]:
    """Another effective batch with the same learning rate, in the first step in which all of it is known.

    Which rule is right (the linear one of Goyal et al. 2017 for SGD, the square root for Adam, none) depends on the
    optimizer and the task, so it is something to know, and no verdict.
    """
    batch, rate = by_name.get("tokens a step"), by_name.get("learning rate")
    if batch is None or rate is None:
        return []
    known = np.isfinite(batch.a) & np.isfinite(batch.b) & np.isfinite(rate.a) & np.isfinite(rate.b)
    known &= (batch.a > 0) & (batch.b > 0)
    if not known.any():
        return []
    at = int(known.argmax())
    times = float(batch.b[at] / batch.a[at])
    if max(times, 1 / times) < _LEAST_SCALED or abs(rate.b[at] - rate.a[at]) > EXACT * abs(rate.a[at]):
        return []
    value = figure(float(rate.a[at]))
    said = (
        f"the effective batch of B is {figure(times)} times that of A and the learning rate is {value} in both: it is"
        f" usually scaled by {figure(times)} for SGD and by {figure(times**0.5)} for Adam"
    )
    return [Difference("learning rate not scaled", int(np.intersect1d(a.steps, b.steps)[at]), value, value, said, True)]


def _factor(ratio: float, a: ComparedJob, b: ComparedJob) -> str:
    """What a ratio may come from: the number of data ranks is the usual one."""
    if not np.isfinite(ratio) or ratio <= 0:
        return ""
    upright = ratio if ratio >= 1 else 1 / ratio
    whole = round(upright)
    if whole < 2 or abs(upright - whole) > _WHOLE * whole:
        return ""
    times = f"{whole} times" if ratio >= 1 else f"1/{whole}"
    ranks = {a.data_ranks, b.data_ranks}
    return f" ({times}: the number of data ranks)" if whole in ranks and len(ranks) > 1 else f" ({times})"


def _effect(quantity: Quantity, steps: list[int]) -> Difference | None:
    if quantity.apart is None:
        return None
    at = steps.index(quantity.apart)
    left, right = figure(float(quantity.a[at])), figure(float(quantity.b[at]))
    said = f"the {quantity.name} is {right} in B and {left} in A"
    return Difference(quantity.name, quantity.apart, left, right, said)


def _began(a: ComparedJob, b: ComparedJob, steps: list[int]) -> list[Difference]:
    shared = [name for name in a.began if name in b.began and a.began[name][0] == b.began[name][0]]
    other = [name for name in shared if a.began[name][1] != b.began[name][1]]
    if not other:
        return []
    said = (
        f"{other[0]} began with other values"
        + (f", and so did {len(other) - 1} more of {len(shared)} parameters" if len(other) > 1 else "")
        + ": another seed, another order of making the model, or another checkpoint"
    )
    return [Difference("initial parameters", steps[0], other[0], other[0], said)]


def _settings(a: ComparedJob, b: ComparedJob, steps: list[int]) -> list[Difference]:
    """Fields that part, each at the first step in which it does."""
    found: dict[str, Difference] = {}
    known: set[str] = set()  # to have been alike; before it is, it may have parted from the beginning
    changes = {at for job in (a, b) for at, _ in job.settings}
    looked = sorted({steps[0], *(s for s in changes if steps[0] < s <= steps[-1])})
    for step in looked:
        left, right = a.settings_at(step), b.settings_at(step)
        for name in left.keys() & right.keys() - found.keys():
            strong = name in (*_PRECISION, *_MODES) or name.startswith("optimizer")
            if left[name] != right[name] and name != "optimizer shares":
                said = f"{name}: {right[name] or 'none'} in B and {left[name] or 'none'} in A"
                since = step if name in known else steps[0]
                found[name] = Difference(name, since, left[name], right[name], said, possible=not strong)
        known |= left.keys() & right.keys()
    return list(found.values())


def _faults(a: ComparedJob, b: ComparedJob, steps: list[int]) -> list[Difference]:
    """Silent errors of one run that the other does not have, such as a setting of one rank only."""
    found = []
    for name, job, other in (("A", a, b), ("B", b, a)):
        for fault in job.faults:
            if fault.code not in {one.code for one in other.faults}:
                sides = ("", fault.code) if name == "B" else (fault.code, "")
                at = min(max(fault.step or 0, steps[0]), steps[-1])
                said = f"in {name} {fault.summary} ({fault.code})"
                found.append(Difference(fault.code, at, *sides, said, possible=fault.confidence is Confidence.POSSIBLE))
    return sorted(found, key=lambda one: one.what == "replica-divergence")  # what made copies part comes first


def _inputs(a: ComparedJob, b: ComparedJob, steps: list[int]) -> list[Difference]:
    """The first step with other samples. Ranks that share a sample (tensor, context) must be as many in both."""
    if a.world * b.data_ranks != b.world * a.data_ranks:
        return []
    since = steps[0]  # before both are known, they may have parted from the beginning
    for step in steps:
        left, right = a.samples.get(step), b.samples.get(step)
        unit = "sample"
        if (not left or not right) and a.data_ranks == b.data_ranks:
            left, right, unit = a.batches.get(step), b.batches.get(step), "batch"
        if left and right and left == right:
            since = step + 1
        elif left and right:
            alike = sum((Counter(left) & Counter(right)).values())
            of = f"{alike} of the {count(len(right), unit, 'batches' if unit == 'batch' else 'samples')} of B are in A"
            return [Difference("samples", since, "", "", f"the runs read other samples (in step {step}, {of})")]
    return []


def _batch_norm(a: ComparedJob, b: ComparedJob, step: int) -> list[Difference]:
    layers = b.settings_at(step).get("batch norm", "")
    if a.data_ranks == b.data_ranks or not layers.endswith("of each rank"):
        return []
    said = (
        "batch norm takes its statistics from the samples of each rank,"
        f" and A cuts a step's samples into {a.data_ranks} and B into {b.data_ranks}"
    )
    return [Difference("batch norm", step, str(a.data_ranks), str(b.data_ranks), said)]


def _gradients(a: ComparedJob, b: ComparedJob, steps: list[int], tolerance: float) -> list[Difference]:
    """The first step with a parameter whose gradient parts, as far as both looked at it."""
    worst = 0.0
    for step in steps:
        left, right = a.gradients.get(step, {}), b.gradients.get(step, {})
        apart = {name: d for name in left if name in right and (d := _distance(left[name], right[name])) is not None}
        odd = [name for name, distance in apart.items() if distance > max(tolerance, JUMP * worst)]
        if odd:
            what, times = f"gradient of {odd[0]}", _times(left, right, list(apart))
            said = f"the gradient of {odd[0]} is another one ({len(odd)} of {len(apart)} that both looked at)"
            if times is not None:
                clipped, clipped_b = (job.settings_at(step).get(CLIPPING, "") for job in (a, b))
                by_clipping = clipped != clipped_b and clipped and clipped_b
                why = f"; {CLIPPING}: {clipped_b} in B and {clipped} in A" if by_clipping else ""
                factor = "" if by_clipping else _factor(times, a, b)
                said = f"gradients are {figure(times)} times as large in B{factor}, first seen in {odd[0]}{why}"
            return [Difference(what, step, "", "", said, effect=times is None)]
        worst = max([worst, *apart.values()])
    return []


def _distance(a: Sketch, b: Sketch) -> float | None:
    if a.held != b.held:
        return None
    size = max(a.scale, b.scale)
    return float(np.linalg.norm(a.value - b.value)) / size if size > 0 else 0.0


def _times(a: dict[str, Sketch], b: dict[str, Sketch], names: list[str]) -> float | None:
    """The one factor between all gradients, when that is all there is between them."""
    left = np.concatenate([a[name].value for name in names])
    right = np.concatenate([b[name].value for name in names])
    times = float(left @ right / max(left @ left, np.finfo(float).tiny))
    rest = float(np.linalg.norm(right - times * left)) / max(float(np.linalg.norm(right)), np.finfo(float).tiny)
    return times if times > 0 and rest < _WHOLE and abs(times - 1) > _WHOLE else None


def _bitwise(a: ComparedJob, b: ComparedJob, steps: list[int]) -> int:
    """In how many steps all parameters were read by both and are equal; 0 when one is not."""
    known = [step for step in steps if step in a.digests and step in b.digests]
    for step in known:
        if a.digests[step] != b.digests[step]:
            return 0
    return len(known)


def _notes(a: ComparedJob, b: ComparedJob, steps: list[int]) -> list[str]:
    notes = []
    if steps[0] > min(a.steps[0], b.steps[0]) or not (a.began and b.began):
        notes.append(
            f"what the parameters began with is not known of both runs; the first step in common is {steps[0]}"
        )
    if not any(step in b.samples for step in a.samples) and a.data_ranks != b.data_ranks:
        notes.append("samples were not written down in the same steps of both runs, so whether they agree is not known")
    if not any(step in b.gradients for step in a.gradients):
        notes.append("no gradient was looked at in both runs; probes={'ledger': 'all'} looks at all of them")
    return notes
