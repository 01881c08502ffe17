"""The faults that the laws find, under every wrapper: code, steps to detection, rank and parameter, and the quiet twin.

``python -m tests.benchmarks.laws_table`` trains the small jobs of `dtobs.drills.silent` on two real ranks each, with
and without the fault, and prints what the table of ``dtobs/README.md`` was made of.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dtobs.detectors import run_detectors
from dtobs.drills.faults import TROUBLES, Fault, Layout
from dtobs.drills.silent import SilentJob
from dtobs.findings import Finding
from dtobs.recording.view import load_run
from tests.faults.silent_programs import run_silent
from tests.harness import run_ranks

_SHARED: tuple[Layout, ...] = ("ddp", "fsdp", "hsdp")
_ALL: tuple[Layout, ...] = (*_SHARED, "by-hand")
LAWS: dict[str, dict[str, tuple[Layout, ...]]] = {
    "L1 gradient ledger": {"unwrapped": ("ddp",), "wiped": ("ddp", "by-hand"), "rescaled": _ALL},
    "L2 update audit": {
        "stale": _ALL,
        "ignored-rate": _ALL,
        "overwritten": ("ddp", "by-hand"),
        "coarse": _ALL,
    },
    "L3 loss": {"nan-loss": _ALL, "loud": _ALL},
    "L4 equality": {
        "initial-parameters": ("by-hand", "hsdp"),
        "equal-dropout": _ALL,
        "other-settings": _ALL,
        "other-rate": _ALL,
    },
    "L5 data ledger": {"same-data": _ALL, "uneven": _ALL},
    "L6 restarts": {"rotten-checkpoint": _ALL},
    "L7 collectives": {"corrupted-message": ("by-hand",)},
    "replicas": {"flipped-bit": ("ddp", "hsdp", "by-hand"), "nan": _ALL},
}
"""The faults of each law and the layouts in which they are tried, on two ranks: under HSDP both have a copy."""
_FROM_THE_START = 1
_LATER = frozenset(
    {"rescaled", "overwritten", "flipped-bit", "nan", "nan-loss", "loud", "corrupted-message", "rotten-checkpoint"}
)
"""Faults that strike at the job's `at_step`, counted from 0; the first step is 1."""


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
    quiet: dict[Layout, bool] = {}
    for law, names in LAWS.items():
        for name, wrappers in names.items():
            trouble = TROUBLES[name]
            for wrapper in wrappers:
                if wrapper not in quiet:
                    quiet[wrapper] = not _found("none", wrapper)
                yield _row(law, trouble, wrapper, quiet[wrapper])


def _row(law: str, trouble: Fault, wrapper: Layout, twin_quiet: bool) -> Row:
    mine = [finding for finding in _found(trouble.name, wrapper) if finding.code == trouble.code]
    if not mine:
        return Row(law, trouble.name, wrapper, trouble.code or "", None, False, "", twin_quiet)
    finding = mine[0]
    struck = SilentJob.at_step + 1 if trouble.name in _LATER else _FROM_THE_START
    # Of two ranks that differ none can be called the odd one, unless something else than their difference tells.
    right = 1 in finding.ranks if trouble.names == "odd" else finding.ranks == (0, 1)
    named = next((e[key] for e in finding.evidence for key in ("parameter", "parameters") if e.get(key)), "")
    parameter = named if isinstance(named, str) else f"{len(named)} of 4"
    steps = max(0, (finding.step or 0) - struck)
    return Row(law, trouble.name, wrapper, finding.code, steps, right, parameter, twin_quiet)


def _found(name: str, wrapper: Layout) -> list[Finding]:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(run_silent, 2, SilentJob(Path(folder), name, wrapper), timeout=120)
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
