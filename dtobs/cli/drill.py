"""Inject faults into small real jobs on this machine and show that each is found and named.

Every FAULT is done to a job of two ranks on the CPU, under each layout that it applies to (DDP, FSDP2, HSDP, tensor
and pipeline parallel, gradients averaged by hand), and so is its healthy twin. Without FAULT, all of them; --quick
takes one layout of each; --list names them. Ends with 0 when every fault was found at the right ranks, nobody else
was accused and every twin was quiet, else with 1. What this machine does not permit is said and skipped.

examples:
  dtobs drill stopped killed
  dtobs drill --quick
  dtobs drill --wrapper fsdp --keep drills/
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from dtobs.cli import Exit
from dtobs.errors import DependencyMissing, UsageError

if TYPE_CHECKING:
    from dtobs.drills.perform import Drill, Outcome

_TWIN = "none"
_CORES_A_DRILL = 2


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("faults", nargs="*", metavar="FAULT", help="what to inject (default: everything)")
    parser.add_argument("--list", action="store_true", help="name the faults, their codes and layouts")
    parser.add_argument("--quick", action="store_true", help="each fault under one layout only")
    parser.add_argument("--wrapper", metavar="W", help="only this layout: ddp, fsdp, hsdp, tp, pp, by-hand")
    parser.add_argument("--at-once", type=int, metavar="N", help="drills at a time (default: half the cores)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the run directories below DIR")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")


def run(args: argparse.Namespace) -> int:
    """Perform the drills and print a line for each."""
    if find_spec("torch") is None:
        raise DependencyMissing("torch", "train")
    from dtobs.drills.perform import known

    every = known()
    if args.list:
        _list(every, as_json=args.json)
        return Exit.NOTHING_FOUND
    chosen = _choose(every, args.faults, args.wrapper, quick=args.quick)
    if args.at_once is not None and args.at_once < 1:
        raise UsageError(f"--at-once {args.at_once}: give 1 or more")
    if args.keep is not None and args.keep.exists() and not args.keep.is_dir():
        raise UsageError(f"{args.keep} is a file: give a new folder to --keep")
    if args.keep is not None and args.keep.exists() and any(args.keep.iterdir()):
        raise UsageError(f"{args.keep} is not empty: give a new folder to --keep")
    at_once = args.at_once or max(1, len(os.sched_getaffinity(0)) // _CORES_A_DRILL)
    with tempfile.TemporaryDirectory(prefix="dtobs-drill-") as scratch:
        outcomes = _perform(chosen, args.keep or Path(scratch), at_once, quiet=args.json)
    failed = [outcome for outcome in outcomes if not outcome.passed]
    skipped = [outcome for outcome in outcomes if outcome.skipped]
    if args.json:
        print(json.dumps([_row(outcome) for outcome in outcomes], indent=1))
    else:
        done = len(outcomes) - len(skipped)
        print(f"\n{done - len(failed)} of {done} as expected")
        for reason in dict.fromkeys(outcome.skipped for outcome in skipped):
            print(f"not tried: {', '.join(dict.fromkeys(o.drill.name for o in skipped))}: {reason}")
    return Exit.ERROR if failed else Exit.NOTHING_FOUND


def _list(every: list[Drill], *, as_json: bool) -> None:
    faults: dict[tuple[str, str], list[str]] = {}
    for drill in every:
        if drill.expected:
            faults.setdefault((drill.name, drill.expected), []).append(drill.wrapper)
    if as_json:
        rows = [{"fault": name, "code": code, "layouts": under} for (name, code), under in faults.items()]
        print(json.dumps(rows, indent=1))
        return
    for (name, code), under in faults.items():
        print(f"{name:<20} {code:<22} {' '.join(under)}")


def _choose(every: list[Drill], names: list[str], wrapper: str | None, *, quick: bool) -> list[Drill]:
    """The drills asked for, each family's after its healthy twins. Raises UsageError for what there is not."""
    unknown = sorted(set(names) - {drill.name for drill in every})
    if unknown:
        raise UsageError(f"there is no fault {unknown[0]!r}; 'dtobs drill --list' names them")
    asked = [d for d in every if (not names or d.name in names) and wrapper in (None, d.wrapper)]
    if quick:
        asked = list({(d.family, d.name): d for d in reversed(asked)}.values())[::-1]
    jobs = {(drill.family, drill.wrapper) for drill in asked}
    chosen = [d for d in every if d in asked or (d.name == _TWIN and (d.family, d.wrapper) in jobs)]
    if not chosen:
        raise UsageError(f"none of these faults applies under the wrapper {wrapper!r}")
    return chosen


def _perform(chosen: list[Drill], folder: Path, at_once: int, *, quiet: bool) -> list[Outcome]:
    from dtobs.drills.perform import perform_all
    from dtobs.monitor.capture import capture_ranks

    if not quiet:
        print(f"{'fault':<20} {'under':<8} {'expected':<22} {'found':<22} {'ranks':<6} {'seconds':>7}")
    tell = (lambda outcome: None) if quiet else _tell
    return perform_all(chosen, folder.absolute(), capture_ranks, at_once=at_once, told=tell)


def _tell(outcome: Outcome) -> None:
    drill, verdict = outcome.drill, outcome.diagnosis.verdict if outcome.diagnosis else None
    name = "(healthy twin)" if drill.name == _TWIN else drill.name
    found = "not tried" if outcome.skipped else outcome.found or "nothing"
    ranks = ",".join(map(str, verdict.ranks[:4])) if verdict else ""
    seconds = "" if outcome.seconds is None else f"{outcome.seconds:.1f}"
    mark = "" if outcome.passed else "  WRONG"
    expected = drill.expected or "nothing"
    print(f"{name:<20} {drill.wrapper:<8} {expected:<22} {found:<22} {ranks:<6} {seconds:>7}{mark}", flush=True)


def _row(outcome: Outcome) -> dict[str, object]:
    verdict = outcome.diagnosis.verdict if outcome.diagnosis else None
    return {
        "fault": outcome.drill.name,
        "family": outcome.drill.family,
        "wrapper": outcome.drill.wrapper,
        "expected": outcome.drill.expected,
        "found": outcome.found,
        "ranks": list(verdict.ranks) if verdict else [],
        "summary": verdict.summary if verdict else None,
        "seconds": outcome.seconds,
        "passed": outcome.passed,
        "skipped": outcome.skipped or None,
    }
