"""What a run did, whatever the number of its ranks, so that one rank can be compared with eight.

That is one value a step for the whole job, its settings, the first values of its parameters, and sketches of gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dtobs.detectors.peers import data_groups, rows_of
from dtobs.detectors.silent import DETECTORS
from dtobs.detectors.silent.loss_weights import weighed
from dtobs.detectors.silent.sample_ledger import streams
from dtobs.errors import TargetError
from dtobs.findings import Finding
from dtobs.recording.laws import LEDGER, LOSS_WEIGHTS, Side
from dtobs.recording.meta import Parameter
from dtobs.recording.ring import STEP_CAPACITY
from dtobs.recording.step_window import StepWindow
from dtobs.recording.view import RunView

Floats = npt.NDArray[np.float64]


Held = tuple[object, ...]
"""What of a parameter a rank holds: the whole, or which shard. Only numbers of the same are compared."""


@dataclass(frozen=True)
class Sketch:
    """A look at one parameter's gradient as the optimizer was given it."""

    held: Held
    value: Floats
    scale: float  #: root of the sum of squares of what was looked at


@dataclass(frozen=True)
class ComparedJob:
    """A run. Every series is float64[steps], NaN where nothing is known; `values` has them by name."""

    name: str
    world: int
    data_ranks: int
    steps: npt.NDArray[np.int64]
    values: dict[str, Floats]
    batches: dict[int, tuple[int, ...]]  #: by step: digests of what each data rank read, sorted
    samples: dict[int, tuple[int, ...]]  #: by step: digests of all samples that the data ranks read, sorted
    settings: list[tuple[int, dict[str, str]]]  #: (step, fields that changed), of the first rank
    began: dict[str, tuple[Held, int]]  #: by parameter: digest of what it began with
    digests: dict[int, dict[str, tuple[Held, int]]]  #: by step: digest of each parameter after it
    gradients: dict[int, dict[str, Sketch]] = field(default_factory=dict)  #: by step and parameter
    faults: list[Finding] = field(default_factory=list)  #: what is found of silent errors in this run by itself

    def settings_at(self, step: int) -> dict[str, str]:
        """The settings in `step`."""
        state: dict[str, str] = {}
        for at, fields in self.settings:
            if at <= step:
                state |= fields
        return state


def read_job(view: RunView, name: str) -> ComparedJob:
    """Gather a run. Raises TargetError when no rank has finished a step."""
    window = view.steps(STEP_CAPACITY)
    if not len(window.steps):
        raise TargetError(f"{name}: no rank has finished a step, so there is nothing to compare")
    group = _who_speaks(view, window)
    rows = rows_of(view, group)
    records, valid = window.records[rows], window.valid[rows]
    said = valid & (records["losses"] > 0)
    tokens = np.where(valid, records["tokens"], np.nan)
    weights, counted = _loss_weights(view, group, window.steps)
    tokens = _total(tokens, valid) if np.isfinite(tokens).any() else counted
    values = {
        "tokens a step": tokens,
        "weight of the losses": weights,
        "learning rate": _first(np.where(valid, records["learning_rate"], np.nan)),
        "gradient norm": _gradient_norm(window),
        "loss": _mean(records["loss"], said),
    }
    values["learning rate"][values["learning rate"] == 0] = np.nan  # nobody said
    first = view.ranks[0]
    digests = _digests(view)
    began = digests.pop(int(window.steps[0]) - 1, {})
    return ComparedJob(
        name,
        view.world_size,
        len(group),
        window.steps,
        values,
        _batches(window.steps, records, valid),
        _samples(view, group),
        view.meta(first).settings,
        began,
        digests,
        _gradients(view),
        [finding for detect in DETECTORS for finding in detect(view)],
    )


def _who_speaks(view: RunView, window: StepWindow) -> list[int]:
    """The ranks whose losses together are the job's: one for each share of the data, where the loss is known."""
    groups = data_groups(view) or [[rank] for rank in view.ranks]

    def known(group: list[int]) -> int:
        rows = rows_of(view, group)
        return int((window.valid[rows] & (window.records["losses"][rows] > 0)).sum())

    return max(groups, key=known)


def _total(values: Floats, valid: npt.NDArray[np.bool_]) -> Floats:
    """The sum over ranks, of steps that all of them have."""
    return np.where(valid.all(axis=0), values.sum(axis=0), np.nan)


def _mean(values: Floats, said: npt.NDArray[np.bool_]) -> Floats:
    """The mean over the ranks that said something."""
    count = said.sum(axis=0)
    total = np.where(said, values, 0.0).sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _first(values: Floats) -> Floats:
    """The first finite value over the ranks: what they must agree on."""
    finite = np.isfinite(values)
    at = finite.argmax(axis=0)
    return np.where(finite.any(axis=0), values[at, np.arange(values.shape[1])], np.nan)


def _gradient_norm(window: StepWindow) -> Floats:
    """Of the whole model after reduction: as a rank that holds all of it has it, else from the shares of all ranks."""
    known = _first(window.field("reduced_norm"))
    return np.where(np.isfinite(known), known, np.sqrt(window.field("reduced_square").sum(axis=0)))


def _loss_weights(view: RunView, group: list[int], steps: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
    """By step: the weight of all losses of a data rank together (mean over them), and the tokens of all."""
    weights, tokens = np.full((len(group), len(steps)), np.nan), np.full((len(group), len(steps)), np.nan)
    for row, rank in enumerate(group):
        records = view.law(LOSS_WEIGHTS, rank)
        for step in np.intersect1d(records["step"], steps):
            here = weighed(records[records["step"] == step])
            if len(here):
                at = np.searchsorted(steps, step)
                weights[row, at], tokens[row, at] = here["total"].sum(), here["tokens"].sum()
    return weights.mean(axis=0), tokens.sum(axis=0)


def _batches(
    steps: npt.NDArray[np.int64], records: npt.NDArray[np.void], valid: npt.NDArray[np.bool_]
) -> dict[int, tuple[int, ...]]:
    whole = valid.all(axis=0) & (records["input_digest"] != 0).all(axis=0)
    return {int(steps[n]): tuple(sorted(records["input_digest"][:, n].tolist())) for n in np.flatnonzero(whole)}


def _samples(view: RunView, group: list[int]) -> dict[int, tuple[int, ...]]:
    """Of the steps in which every data rank wrote down all of its samples."""
    by_rank = [(stream, dict(stream.batches.tolist())) for stream in streams(view, group)]
    if len(by_rank) < len(group):
        return {}
    found = {}
    for step in set.intersection(*(set(rows) for _, rows in by_rank)):
        read = [stream.digests[stream.steps == step].tolist() for stream, _ in by_rank]
        if [len(part) for part in read] == [rows[step] for _, rows in by_rank]:
            found[step] = tuple(sorted(digest for part in read for digest in part))
    return found


def _digests(view: RunView) -> dict[int, dict[str, tuple[Held, int]]]:
    """What the parameters were after each step that was read: each from the first rank that has it."""
    found: dict[int, dict[str, tuple[Held, int]]] = {}
    known: set[str] = set()
    for rank in view.ranks:
        table = view.meta(rank).params
        new = [n for n, row in enumerate(table) if row.name not in known]
        for record in view.digests(rank) if new else ():
            if len(record["digest"]) == len(table):
                at = found.setdefault(int(record["step"]), {})
                at.update((table[n].name, (_held(table[n]), int(record["digest"][n]))) for n in new)
        known.update(table[n].name for n in new)
    return found


def _held(row: Parameter) -> Held:
    """A key ends in its shards, "/" before them; none stand there where the rank has all of it."""
    kind, _, shards = row.replica.partition("/")
    return (row.shape, kind.rpartition(":")[2] + "/" + shards if shards else "")


def _gradients(view: RunView) -> dict[int, dict[str, Sketch]]:
    """The looks of the gradient ledger at what the optimizers were given, each from the first rank that has it."""
    found: dict[int, dict[str, Sketch]] = {}
    for rank in view.ranks:
        meta = view.meta(rank)
        names = meta.laws.get(LEDGER.name, {}).get("rows", [])
        table = {row.name: row for row in meta.params}
        records = view.law(LEDGER, rank)
        for record in records[records["side"] == Side.FINAL]:
            if record["row"] >= len(names) or not np.isfinite(record["value"]).all():
                continue
            name = str(names[record["row"]])
            if name in table:
                sketch = Sketch(_held(table[name]), record["value"].astype(np.float64), float(record["scale"]))
                found.setdefault(int(record["step"]), {}).setdefault(name, sketch)
    return found
