"""Inject faults into small real jobs on this machine and show that each is found and named.

Every FAULT is done to a job of two ranks on the CPU, under each layout that it applies to (DDP, FSDP2, HSDP, tensor
and pipeline parallel, gradients averaged by hand), and so is its healthy twin. Without FAULT, all of them; --quick
takes one layout of each; --list names them. Ends with 0 when every fault was found at the right ranks, nobody else
was accused and every twin was quiet, else with 1. What this machine does not permit is said and skipped.

With --endings, somebody ends each job in the middle of its hang, before or after the hang was found: Ctrl-C, SIGTERM,
SIGKILL of all, of one rank or of the launcher, the loss of the node, the job's own timeout. What the run stood in must
still be the verdict. A few cells of that matrix by default; --all takes every one of them. With --early, nobody ends
it, and `dtobs diagnose` is asked 15 seconds into each hang, long before the alarm.

With --flips N, single bits are flipped at random in N small trainings of three ranks: in parameters, gradients before
and after their reduction, optimizer state, activations, and what calls bring. The table says how many of them changed
what the training ends with, and how many of those were found, after how many steps, with the right rank and parameter.
It ends with 1 when anything was accused wrongly; what was missed is no failure. DTOBS_PROBES applies as in any job.

examples:
  dtobs drill stopped killed
  dtobs drill --quick
  dtobs drill --wrapper fsdp --keep drills/
  dtobs drill --endings --way kill-all --when before stopped absent
  dtobs drill --early
  dtobs drill --flips 60
  DTOBS_PROBES=conservation=all,updates=all dtobs drill --flips 60 --wrapper zero1
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from dtobs.catalogue import CATALOGUE
from dtobs.cli import Exit
from dtobs.drills.faults import TWIN, Drill, known
from dtobs.errors import DependencyMissing, UsageError

if TYPE_CHECKING:
    from dtobs.drills.endings import JudgedCell
    from dtobs.drills.perform import Outcome

_CODE = max(map(len, CATALOGUE))
"""How wide a column of codes is."""

_CORES_A_DRILL = 2


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("faults", nargs="*", metavar="FAULT", help="what to inject (default: everything)")
    parser.add_argument("--list", action="store_true", help="name the faults, their codes and layouts")
    parser.add_argument("--quick", action="store_true", help="each fault under one layout only")
    parser.add_argument("--wrapper", metavar="W", help="only this layout: ddp, fsdp, hsdp, tp, pp, by-hand")
    parser.add_argument("--endings", action="store_true", help="end each job in its hang: is that still the verdict?")
    parser.add_argument("--early", action="store_true", help="ask 15 s into each hang, long before the alarm")
    parser.add_argument("--way", metavar="WAY", help="with --endings: only this way of ending")
    parser.add_argument(
        "--when", choices=("before", "after"), help="with --endings: before or after the hang was found"
    )
    parser.add_argument("--all", action="store_true", help="with --endings: every cell of the matrix")
    parser.add_argument("--flips", type=int, metavar="N", help="flip a bit in each of N trainings: what is found?")
    parser.add_argument("--seed", type=int, default=0, help="with --flips: which bits (default: 0)")
    parser.add_argument("--at-once", type=int, metavar="N", help="drills at a time (default: half the cores)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the run directories below DIR")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")


def run(args: argparse.Namespace) -> int:
    """Perform the drills and print a line for each."""
    if find_spec("torch") is None:
        raise DependencyMissing("torch", "train")
    every = known()
    if args.list:
        _list(every, as_json=args.json)
        return Exit.NOTHING_FOUND
    _check(args)
    if args.flips is not None:
        return _flips(args)
    if args.endings or args.early:
        return _endings(args)
    chosen = _choose(every, args.faults, args.wrapper, quick=args.quick)
    at_once = args.at_once or max(1, len(os.sched_getaffinity(0)) // _CORES_A_DRILL)
    with tempfile.TemporaryDirectory(prefix="dtobs-drill-", ignore_cleanup_errors=True) as scratch:
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


def _check(args: argparse.Namespace) -> None:
    """Raises UsageError for what cannot be."""
    if not args.endings and (args.way or args.when or args.all):
        raise UsageError("--way, --when and --all are for --endings")
    if args.flips is not None and (args.flips < 1 or args.faults or args.endings or args.early):
        raise UsageError("--flips takes a number from 1 on, no FAULT, and neither --endings nor --early")
    if args.at_once is not None and args.at_once < 1:
        raise UsageError(f"--at-once {args.at_once}: give 1 or more")
    if args.keep is not None and args.keep.exists() and not args.keep.is_dir():
        raise UsageError(f"{args.keep} is a file: give a new folder to --keep")
    if args.keep is not None and args.keep.exists() and any(args.keep.iterdir()):
        raise UsageError(f"{args.keep} is not empty: give a new folder to --keep")


def _endings(args: argparse.Namespace) -> int:
    """Play the cells of the matrix that were asked for, and count."""
    from dtobs.drills import endings
    from dtobs.monitor.capture import capture_ranks

    ways = ("asked",) if args.early else (args.way,) if args.way else tuple(endings.WAYS)
    if unknown := [way for way in ways if way not in endings.WAYS]:
        raise UsageError(f"there is no way of ending {unknown[0]!r}; they are {', '.join(endings.WAYS)}")
    every = endings.cells(early=args.early)
    _check_names(args.faults, {cell.fault for cell in every})
    asked = [
        cell
        for cell in every
        if cell.way in ways
        and args.when in (None, cell.when)
        and args.wrapper in (None, cell.layout)
        and (not args.faults or cell.fault in args.faults)
    ]
    if not asked:
        raise UsageError("no cell of the matrix is all of that")
    chosen = asked if args.all else endings.some(asked)
    tell = (lambda judged: None) if args.json else _tell_ending
    with tempfile.TemporaryDirectory(prefix="dtobs-drill-", ignore_cleanup_errors=True) as scratch:
        folder = (args.keep or Path(scratch)).absolute()
        played = endings.play_all(chosen, folder, capture_ranks, at_once=args.at_once or _CORES_A_DRILL, told=tell)
    if args.json:
        print(json.dumps([judged.to_json() for judged in played], indent=1))
    else:
        print(f"\n{'way of ending':<16} {'the alarm':<10} right")
        for way, when, right, done, tried in endings.counted(played):
            left = f", {tried - done} could not be played" if done < tried else ""
            print(f"{way:<16} {when:<10} {right} of {done}{left}")
    return Exit.ERROR if any(judged.wrong for judged in played) else Exit.NOTHING_FOUND


def _flips(args: argparse.Namespace) -> int:
    """Flip bits, and print the table."""
    from dtobs.drills import flips

    if args.wrapper not in (None, *flips.TARGETS):
        raise UsageError(f"bits are flipped under the layouts {', '.join(flips.TARGETS)}, not {args.wrapper!r}")
    layouts = (args.wrapper,) if args.wrapper else tuple(flips.TARGETS)
    with tempfile.TemporaryDirectory(prefix="dtobs-drill-", ignore_cleanup_errors=True) as scratch:
        folder = (args.keep or Path(scratch)).absolute()
        trials = flips.play_all(flips.draw(args.flips, args.seed, layouts), folder)
    if args.json:
        print(json.dumps([trial.to_json() for trial in trials], indent=1))
    else:
        print(f"{flips.table(trials)}\n{flips.summary(trials)}", end="")
        for trial in trials:
            if trial.wrong:
                print(f"WRONG: {trial.layout}: {trial.wrong}")
    return Exit.ERROR if flips.failed(trials) else Exit.NOTHING_FOUND


def _tell_ending(judged: JudgedCell) -> None:
    cell = judged.cell
    said = f"WRONG: {judged.wrong}" if judged.wrong else "right"
    row = f"{cell.fault:<20} {cell.layout:<8} {cell.way:<16} {cell.when:<7} {cell.expected:<{_CODE}} {said}"
    print(row, flush=True)


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
        print(f"{name:<20} {code:<{_CODE}} {' '.join(under)}")


def _choose(every: list[Drill], names: list[str], wrapper: str | None, *, quick: bool) -> list[Drill]:
    """The drills asked for, each family's after its healthy twins. Raises UsageError for what there is not."""
    _check_names(names, {drill.name for drill in every})
    asked = [d for d in every if (not names or d.name in names) and wrapper in (None, d.wrapper)]
    if quick:
        asked = list({(d.family, d.name): d for d in reversed(asked)}.values())[::-1]
    twins = {(drill.family, drill.wrapper, drill.twin) for drill in asked}
    chosen = [d for d in every if d in asked or (d.family, d.wrapper, d.name) in twins]
    if not chosen:
        raise UsageError(f"none of these faults applies under the wrapper {wrapper!r}")
    return chosen


def _check_names(names: list[str], known: set[str]) -> None:
    if unknown := sorted(set(names) - known):
        close = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.75)
        if close:
            raise UsageError(f"there is no fault {unknown[0]!r} here; did you mean {close[0]!r}?")
        raise UsageError(f"there is no fault {unknown[0]!r} here; 'dtobs drill --list' names them")


def _perform(chosen: list[Drill], folder: Path, at_once: int, *, quiet: bool) -> list[Outcome]:
    from dtobs.drills.perform import perform_all
    from dtobs.monitor.capture import capture_ranks

    if not quiet:
        print(f"{'fault':<20} {'under':<8} {'expected':<{_CODE}} {'found':<{_CODE}} {'ranks':<6} {'seconds':>7}")
    tell = (lambda outcome: None) if quiet else _tell
    return perform_all(chosen, folder.absolute(), capture_ranks, at_once=at_once, told=tell)


def _tell(outcome: Outcome) -> None:
    drill, verdict = outcome.drill, outcome.diagnosis.verdict if outcome.diagnosis else None
    name = "(healthy twin)" if drill.name == TWIN else drill.name
    found = "not tried" if outcome.skipped else "no recording" if outcome.broken else outcome.found or "nothing"
    ranks = ",".join(map(str, verdict.ranks[:4])) if verdict else ""
    seconds = "" if outcome.seconds is None else f"{outcome.seconds:.1f}"
    mark = "" if outcome.passed else f"  WRONG{': ' * bool(outcome.broken)}{outcome.broken}"
    expected = drill.expected or "nothing"
    row = f"{name:<20} {drill.wrapper:<8} {expected:<{_CODE}} {found:<{_CODE}} {ranks:<6} {seconds:>7}{mark}"
    print(row, flush=True)


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
        "broken": outcome.broken or None,
    }
