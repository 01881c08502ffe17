"""Inject faults into small real jobs on this machine and show that each is found and named.

Every FAULT is done to a job of two ranks on the CPU, under each way of wrapping a model that it applies to, and so is
its healthy twin. Without FAULT, all of them; --list names them. Ends with 0 when every fault was found and every twin
was quiet, else with 1.

examples:
  dtobs drill stopped killed
  dtobs drill --wrapper fsdp --keep drills/
"""

from __future__ import annotations

import argparse
import json
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from dtobs.cli import Exit
from dtobs.errors import DependencyMissing, UsageError

if TYPE_CHECKING:
    from dtobs.drills.perform import Drill, Outcome

_TWIN = "none"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("faults", nargs="*", metavar="FAULT", help="what to inject (default: everything)")
    parser.add_argument("--list", action="store_true", help="name the faults and their codes")
    parser.add_argument("--wrapper", metavar="W", help="only under this wrapper: ddp, fsdp, hsdp, by-hand")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the run directories below DIR")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")


def run(args: argparse.Namespace) -> int:
    """Perform the drills and print a line for each."""
    if find_spec("torch") is None:
        raise DependencyMissing("torch", "train")
    from dtobs.drills.perform import known

    every = known()
    if args.list:
        for name, code in dict.fromkeys((d.name, d.expected) for d in every if d.expected):
            print(f"{name:<20} {code}")
        return Exit.NOTHING_FOUND
    chosen = _choose(every, args.faults, args.wrapper)
    if args.keep is not None and args.keep.exists() and any(args.keep.iterdir()):
        raise UsageError(f"{args.keep} is not empty: give a new folder to --keep")
    with tempfile.TemporaryDirectory(prefix="dtobs-drill-") as scratch:
        outcomes = _perform(chosen, args.keep or Path(scratch), quiet=args.json)
    failed = [outcome for outcome in outcomes if not outcome.passed]
    if args.json:
        print(json.dumps([_row(outcome) for outcome in outcomes], indent=1))
    else:
        print(f"\n{len(outcomes) - len(failed)} of {len(outcomes)} as expected")
    return Exit.ERROR if failed else Exit.NOTHING_FOUND


def _choose(every: list[Drill], names: list[str], wrapper: str | None) -> list[Drill]:
    """The drills asked for, each family's after its healthy twins. Raises UsageError for what there is not."""
    unknown = sorted(set(names) - {drill.name for drill in every})
    if unknown:
        raise UsageError(f"there is no fault {unknown[0]!r}; 'dtobs drill --list' names them")
    asked = [d for d in every if (not names or d.name in names) and wrapper in (None, d.wrapper)]
    jobs = {(drill.family, drill.wrapper) for drill in asked}
    chosen = [d for d in every if d in asked or (d.name == _TWIN and (d.family, d.wrapper) in jobs)]
    if not chosen:
        raise UsageError(f"none of these faults applies under the wrapper {wrapper!r}")
    return chosen


def _perform(chosen: list[Drill], folder: Path, *, quiet: bool) -> list[Outcome]:
    from dtobs.drills.perform import perform
    from dtobs.monitor.capture import capture_ranks

    if not quiet:
        print(f"{'fault':<20} {'under':<8} {'expected':<22} {'found':<22} {'seconds':>7}")
    outcomes = []
    for drill in chosen:
        place = folder / f"{drill.family}-{drill.name}-{drill.wrapper}"
        outcome = perform(drill, place.absolute(), capture_ranks)
        outcomes.append(outcome)
        if not quiet:
            seconds = "" if outcome.seconds is None else f"{outcome.seconds:.1f}"
            name = "(healthy twin)" if drill.name == _TWIN else drill.name
            expected, found = drill.expected or "nothing", outcome.found or "nothing"
            mark = "" if outcome.passed else "  WRONG"
            print(f"{name:<20} {drill.wrapper:<8} {expected:<22} {found:<22} {seconds:>7}{mark}", flush=True)
    return outcomes


def _row(outcome: Outcome) -> dict[str, object]:
    verdict = outcome.diagnosis.verdict
    return {
        "fault": outcome.drill.name,
        "family": outcome.drill.family,
        "wrapper": outcome.drill.wrapper,
        "expected": outcome.drill.expected,
        "found": outcome.found,
        "ranks": list(verdict.ranks) if verdict else [],
        "seconds": outcome.seconds,
        "passed": outcome.passed,
    }
