"""Runs with a gradient ledger: random gradients, what a layout and a fault make of them, written as ranks write it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dtobs.recording.laws import LEDGER, SKETCHES, Side
from dtobs.testing.fake_run import FakeRun

NAMES = ("embed.weight", "blocks.0.norm.weight", "blocks.0.up.weight", "blocks.1.up.weight", "head.weight")

Final = Callable[["Case", int, str, int, np.ndarray], np.ndarray]
"""(case, step, name, rank, its part of all gradients [Q, M, K]) → what that rank's optimizer is given."""


def mean(case: Case, step: int, name: str, rank: int, shares: np.ndarray) -> np.ndarray:
    """What a healthy job does."""
    return shares.sum(axis=(0, 1)) / len(shares)


@dataclass(frozen=True)
class Case:
    """One job. `sharded` as under FSDP2: every rank holds its own part. `noise` is that of the reduction's format."""

    world: int = 4
    micros: int = 1
    sharded: bool = False
    noise: float = 3e-7
    final: Final = mean
    steps: int = 12
    names: tuple[str, ...] = NAMES
    rows: tuple[int, ...] = (0, 3)  #: looked at in a step, counted from its number
    flags: int = 0
    common: float = 0.3  #: how much the gradients of the ranks are alike
    sets: tuple[tuple[int, ...], ...] = ()
    ignored: tuple[int, ...] = ()
    seed: int = 0
    extra: dict[str, object] = field(default_factory=dict)


def ledger_run(root: Path, case: Case) -> FakeRun:
    """A run whose ranks kept the ledger of `case`."""
    run = FakeRun(root, case.world)
    random = np.random.default_rng(case.seed)
    everyone = tuple(range(case.world))
    for rank in run.ranks:
        sets = list(case.sets or [everyone])
        mine = next(n for n, ranks in enumerate(sets) if rank.number in ranks)
        said = {"rows": case.names, "sets": sets, "of": [mine] * len(case.names), "since": 0, **case.extra}
        rank.meta("law", name="ledger", ignored=case.ignored, **said)
    parts = case.world if case.sharded else 1
    for step in range(1, case.steps + 1):
        run.steps(1)
        for row in sorted({(step + n) % len(case.names) for n in case.rows}):
            alike = random.normal(size=(1, case.micros, parts, SKETCHES))
            own = random.normal(size=(case.world, case.micros, parts, SKETCHES))
            local = case.common * alike + own
            for rank in run.ranks:
                _write(rank, case, step, row, local, random)
    return run


def _write(rank, case: Case, step: int, row: int, local: np.ndarray, random: np.random.Generator) -> None:
    record = np.zeros((), LEDGER.dtype)
    ring, q = rank.recorder.law(LEDGER), rank.number
    for micro in range(case.micros):
        for part in range(local.shape[2]):
            value = local[q, micro, part]
            record["step"], record["row"], record["side"] = step, row, Side.LOCAL
            record["micro"], record["part"], record["flags"] = micro, part, 0
            record["value"], record["scale"] = value, np.sqrt((value**2).sum())
            ring.append(record)
    part = q if case.sharded else 0
    given = case.final(case, step, case.names[row], q, local[:, :, part])
    given = given * (1 + random.normal(size=SKETCHES) * case.noise)
    record["side"], record["micro"], record["part"], record["flags"] = Side.FINAL, 0, part, case.flags
    record["value"], record["scale"] = given, np.sqrt((given**2).sum())
    ring.append(record)
