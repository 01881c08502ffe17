"""One mutant on two real ranks, alone and observed, held against the original script."""

from __future__ import annotations

import inspect
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dtobs.detectors import run_detectors
from dtobs.findings import Finding
from dtobs.recording.view import load_run
from dtobs.session.start import attach, current
from tests.benchmarks.mutants import scripts
from tests.benchmarks.mutants.mutate import Mutant
from tests.harness import start_ranks

Trace = list[dict[str, np.ndarray[Any, np.dtype[np.float32]]]]
"""A rank's parameters (its shards) after each step."""

ROUNDING = 1e-4
"""Two trainings are alike when no parameter ends further apart than this share of its norm."""
SECONDS = 90.0
STUCK_SECONDS = 30.0


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant: `outcome` is stopped, same, rounding, changed or disturbed.

    `first` is the first step whose parameters are others, from 1; `moved` are those parameters; `misplaced` are codes
    of findings that name a step before it, or in that very step a parameter that is as it was.
    """

    mutant: str
    operator: str
    outcome: str
    first: int | None
    moved: tuple[str, ...]
    codes: tuple[str, ...]
    summaries: tuple[str, ...]
    misplaced: tuple[str, ...]


class Disturbed(Exception):
    """The observed training is not the one without an observer, or the script is not twice the same."""


def train(rank: int, world: int, source: str, name: str, run_dir: str) -> tuple[Trace, Trace]:
    """A rank's parameters after each step, alone and observed."""
    store = dist.FileStore(os.environ["DTOBS_TEST_STORE"], world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=STUCK_SECONDS))
    names = dict(vars(scripts))
    if "ALONE" in source:
        # Made in both trainings alike, by every rank.
        names["ALONE"], _ = dist.new_subgroups(1)
        names["ALONE_MESH"] = dist.DeviceMesh.from_group(names["ALONE"], "cpu")
    names |= {"ZERO": 0, "OTHER": 1 - rank}
    exec(compile(source, f"<{name}>", "exec"), names)
    traces = []
    for observed in (False, True):
        trace: Trace = []

        def watch(model: Any, optimizer: Any, seen: bool = observed, **options: Any) -> None:
            if seen:
                attach(model, optimizer, run_dir=run_dir, monitor=False, **options)

        def note(loss: Any, model: Any, into: Trace = trace) -> None:
            into.append({n.removeprefix("module."): _values(p) for n, p in model.named_parameters()})

        torch.manual_seed(rank)  # a mutant may leave its generators as they were
        names[name](rank, world, watch, note)
        traces.append(trace)
    dist.barrier()
    session = current()
    if session is not None:
        session.close()
    return traces[0], traces[1]


def _values(parameter: torch.Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    held: torch.Tensor = getattr(parameter, "_local_tensor", parameter)
    return held.detach().float().numpy().copy()


def run(source: str, name: str) -> tuple[list[Trace] | None, list[Finding]]:
    """Traces of every rank (None when the job did not end well) and what was found."""
    folder = Path(tempfile.mkdtemp())
    try:
        with start_ranks(train, 2, source, name, str(folder), init_pg=False) as group:
            group.wait(SECONDS, stop_on_failure=True)
            results = group.results()
        if not all(result.ok for result in results):
            return None, []
        alone, observed = ([result.value[which] for result in results] for which in (0, 1))
        if _distance(alone, observed) != 0:
            raise Disturbed(f"{name}: its two trainings differ by {_distance(alone, observed):.2g}")
        return alone, run_detectors(load_run(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def judge(mutant: Mutant, original: Sequence[Trace]) -> Verdict:
    """Run a mutant and hold it against the original."""
    try:
        traces, found = run(mutant.source, mutant.script)
    except Disturbed as error:
        return Verdict(mutant.name, mutant.operator, "disturbed", None, (), (), (str(error),), ())
    codes, summaries = tuple(f.code for f in found), tuple(f.summary for f in found)
    if traces is None:
        return Verdict(mutant.name, mutant.operator, "stopped", None, (), codes, summaries, ())
    distance = _distance(original, traces)
    outcome = "same" if distance == 0 else "rounding" if distance < ROUNDING else "changed"
    first, moved = _first(original, traces)
    misplaced = tuple(f.code for f in found if outcome == "changed" and _misplaced(f, first, moved))
    return Verdict(mutant.name, mutant.operator, outcome, first, moved, codes, summaries, misplaced)


def _distance(one: Sequence[Trace], other: Sequence[Trace]) -> float:
    """Largest distance of a parameter at the end, over its norm; infinite when shapes or lengths differ."""
    worst = 0.0
    for mine, theirs in zip(one, other, strict=True):
        if len(mine) != len(theirs) or not mine or mine[-1].keys() != theirs[-1].keys():
            return float("inf")
        for name, values in mine[-1].items():
            if values.shape != theirs[-1][name].shape:
                return float("inf")
            if np.array_equal(values, theirs[-1][name], equal_nan=True):
                continue
            gap = float(np.linalg.norm(values - theirs[-1][name]) / (np.linalg.norm(values) + 1e-12))
            worst = max(worst, gap if gap == gap else float("inf"))
    return worst


def _first(one: Sequence[Trace], other: Sequence[Trace]) -> tuple[int | None, tuple[str, ...]]:
    for step in range(min(len(trace) for trace in (*one, *other))):
        moved = {
            name
            for mine, theirs in zip(one, other, strict=True)
            for name, values in mine[step].items()
            if not np.array_equal(values, theirs[step].get(name, None), equal_nan=True)
        }
        if moved:
            return step + 1, tuple(sorted(moved))
    return None, ()


def _misplaced(finding: Finding, first: int | None, moved: tuple[str, ...]) -> bool:
    """Whether it names a step before the mutant did anything, or a parameter that it had not touched by then."""
    if first is None:
        return False
    if finding.step is not None and finding.step < (first if first > 1 else 0):
        return True  # what the ranks began with is no step's
    named = next((e["parameter"] for e in finding.evidence if isinstance(e.get("parameter"), str)), None)
    return finding.step == first and named is not None and named.removeprefix("module.") not in moved


def original(name: str) -> list[Trace]:
    """The traces of a script as it stands; an error when something is found in it."""
    traces, found = run(inspect.getsource(scripts.SCRIPTS[name]), name)
    if traces is None or found:
        raise SystemExit(f"{name} is not healthy: {[f.summary for f in found] or 'it does not end'}")
    return traces
