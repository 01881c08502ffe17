"""The faults that the laws find, under every wrapper: code, steps to detection, rank and parameter, and the quiet twin.

``python -m tests.benchmarks.laws_table`` trains the small jobs of `dtobs.drills.silent` on two real ranks each, with
and without the fault, and prints what the table of ``dtobs/README.md`` was made of.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtobs.detectors import run_detectors
from dtobs.drills.faults import TROUBLES, Fault
from dtobs.drills.silent import SilentJob
from dtobs.findings import Finding
from dtobs.recording.view import load_run
from tests.faults.silent_programs import run_silent
from tests.harness import run_ranks

COLUMNS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"wrapper": "fsdp"},
    "hsdp": {"wrapper": "hsdp"},
    "fsdp1": {"wrapper": "fsdp1"},
    "by-hand": {"wrapper": "by-hand"},
    "zero1": {"wrapper": "zero1"},
    "accumulated": {"accumulate": 3},
    "scaled": {"scaled": True},
    "compiled": {"compiled": True},
    "dp-tp": {"wrapper": "dp-tp"},
    "dp-pp": {"wrapper": "dp-pp"},
    "dp-cp": {"wrapper": "dp-cp"},
    "dp-ep": {"wrapper": "dp-ep"},
}
"""How each column trains. The first five by themselves; accumulation, a scaler and the compiler under DDP; the last
four on a 2 x 2 mesh whose data dimension is averaged by hand: ranks split layers, stages, sequences, or experts."""
_WORLD = dict.fromkeys(("dp-tp", "dp-pp", "dp-cp", "dp-ep"), 4)
_OF_FOUR = ("dp-cp", "dp-ep")
_REPLICATED = ("ddp", "zero1", "accumulated", "scaled", "compiled")
_BY_HAND = ("by-hand", "dp-tp", "dp-pp", "dp-cp", "dp-ep")
_NAN = tuple(c for c in COLUMNS if c not in ("scaled", "compiled"))
"""A scaler leaves a step with a NaN out, which is its work; a compiled model does not see the hook that makes it."""
LAWS: dict[str, dict[str, tuple[str, ...]]] = {
    "L1 gradient ledger": {
        "unwrapped": ("ddp", "zero1", "accumulated", "scaled"),
        "wiped": ("ddp", "zero1", "by-hand"),
        "rescaled": tuple(COLUMNS),
    },
    "L2 update audit": {
        "stale": tuple(c for c in COLUMNS if c != "scaled"),  # a scaler raises
        "ignored-rate": tuple(COLUMNS),
        "overwritten": (*_REPLICATED, *_BY_HAND),
        "coarse": tuple(COLUMNS),
    },
    "L3 loss": {"nan-loss": tuple(COLUMNS), "loud": tuple(COLUMNS)},
    "L4 equality": {
        "initial-parameters": (
            "hsdp",
            "by-hand",
            "dp-pp",
            "dp-cp",
            "dp-ep",
        ),  # shards of one tensor are dealt out by its first rank
        "equal-dropout": tuple(COLUMNS),
        "other-settings": tuple(COLUMNS),
        "other-rate": tuple(COLUMNS),
    },
    "L5 data ledger": {
        "same-data": tuple(COLUMNS),
        "uneven": tuple(c for c in COLUMNS if c != "dp-ep"),  # these experts take equal shares
    },
    "L6 restarts": {"rotten-checkpoint": tuple(COLUMNS)},
    "L7 collectives": {"corrupted-message": _BY_HAND},
    "replicas": {"flipped-bit": (*_REPLICATED, "hsdp", *_BY_HAND), "nan": _NAN},
}
"""The faults of each law and the columns in which they are tried; under HSDP of two ranks both have a copy."""
_FROM_THE_START = 1
_LATER = frozenset(
    {"rescaled", "overwritten", "flipped-bit", "nan", "nan-loss", "loud", "corrupted-message", "rotten-checkpoint"}
)
"""Faults that strike at the job's `at_step`, counted from 0; the first step is 1."""
_OF_TWO = frozenset({"rescaled", "other-settings", "other-rate"})
"""Faults of one rank that show as a difference from its peer."""


@dataclass(frozen=True)
class Row:
    """One fault under one wrapper. `steps` from the fault to the step that the finding names; None: not found."""

    law: str
    fault: str
    wrapper: str
    code: str
    steps: int | None
    ranks_right: bool
    parameter: str
    twin_quiet: bool


def rows() -> Iterator[Row]:
    """Every fault of the laws under each wrapper it applies to."""
    quiet: dict[str, bool] = {}
    for law, names in LAWS.items():
        for name, wrappers in names.items():
            trouble = TROUBLES[name]
            for wrapper in wrappers:
                if wrapper not in quiet:
                    quiet[wrapper] = not found("none", wrapper)
                yield _row(law, trouble, wrapper, quiet[wrapper])


def _row(law: str, trouble: Fault, wrapper: str, twin_quiet: bool) -> Row:
    mine = [finding for finding in found(trouble.name, wrapper) if finding.code == trouble.code]
    if not mine:
        return Row(law, trouble.name, wrapper, trouble.code or "", None, False, "", twin_quiet)
    finding = mine[0]
    struck = SilentJob.at_step + 1 if trouble.name in _LATER else _FROM_THE_START
    ranks = {rank for each in mine for rank in each.ranks}
    right = SilentJob.odd in ranks if trouble.names == "odd" else ranks == _expected(trouble.name, wrapper)
    named = next((e[key] for e in finding.evidence for key in ("parameter", "parameters") if e.get(key)), "")
    parameter = named if isinstance(named, str) else f"{len(named)} of 4"
    steps = max(0, (finding.step or 0) - struck)
    return Row(law, trouble.name, wrapper, finding.code, steps, right, parameter, twin_quiet)


def _expected(name: str, wrapper: str) -> set[int]:
    """The ranks to be named: all that do it, or the two that differ, of which none can be called the odd one.

    Context and expert ranks hold copies on all four, which tell; but of an expert there are two.
    """
    world = _WORLD.get(wrapper, 2)
    if name in _OF_TWO and wrapper in _OF_FOUR and (name, wrapper) != ("rescaled", "dp-ep"):
        return {SilentJob.odd}
    if name in _OF_TWO:
        return {SilentJob.odd, (SilentJob.odd + world // 2) % world}
    first_stages_only = wrapper == "dp-pp" and name in ("equal-dropout", "same-data")
    return {0, 2} if first_stages_only else set(range(world))


def found(name: str, wrapper: str) -> list[Finding]:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(run_silent, _WORLD.get(wrapper, 2), SilentJob(Path(folder), name, **COLUMNS[wrapper]), timeout=120)
        return run_detectors(load_run(Path(folder)))


def main() -> None:
    """Print the table."""
    print("| law | fault | layout | code | steps to it | ranks right | parameter | twin quiet |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows():
        steps = "not found" if row.steps is None else str(row.steps)
        ranks, twin = ("yes" if yes else "no" for yes in (row.ranks_right, row.twin_quiet))
        parameter = f"`{row.parameter}`" if row.parameter else "–"
        print(
            f"| {row.law} | {row.fault} | {row.wrapper} | `{row.code}` | {steps} | {ranks} | {parameter} | {twin} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
