"""Profile some steps of a run that trains, and say where their time goes.

RUN is a run directory; without one, the newest below ./runs. Every rank runs torch.profiler for the same steps and
writes its trace below RUN/traces; then they are analysed as `dtobs trace` does. The training slows down by a few
percent for these steps and stands still for a moment while the traces are written.

examples:
  dtobs profile
  dtobs profile runs/20261120T120000Z-run --steps 5
  dtobs profile runs/20261120T120000Z-run --ranks 0,3 --json
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path

from dtobs.errors import DtobsError, UsageError, opening
from dtobs.findings import exit_code
from dtobs.recording.profiling import Request, answers, ask
from dtobs.recording.rundir import RunDirectory
from dtobs.recording.view import load_run
from dtobs.reports.trace_text import render
from dtobs.timeline.kineto.analyse import analyse
from dtobs.tui.source import newest_run
from dtobs.words import count, ranks_do, ranks_text

_POLL_SECONDS = 0.2


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("run", nargs="?", metavar="RUN", help="run directory (default: the newest in ./runs)")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="how many steps (default 3)")
    parser.add_argument("--ranks", metavar="0,1,…", help="which ranks (default: all)")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="to wait at most (default 300)")
    parser.add_argument("--json", action="store_true", help="print JSON (dtobs.trace/1)")


def run(args: argparse.Namespace) -> int:
    """Ask, wait, analyse, print."""
    target = Path(args.run or newest_run(Path.cwd()))
    if not args.timeout > 0:
        raise UsageError(f"--timeout {args.timeout}: give a positive number of seconds")
    ranks = _ranks(args.ranks)
    with opening(target):
        request = ask(load_run(target, with_capture=False), args.steps, ranks)
    where = RunDirectory(target)
    _say(f"asked {ranks_text(request.ranks)} for steps {request.first} to {request.last}")
    _say(f"traces go to {request.folder(where)}")
    refusals = _wait(where, request, args.timeout)
    for rank, why in refusals.items():
        _say(f"rank {rank} has no trace: {why}")
    found = analyse([request.folder(where)])
    print(json.dumps(found.to_json(), allow_nan=False) if args.json else render(found), end="\n" if args.json else "")
    return exit_code(found.findings)


def _wait(run: RunDirectory, request: Request, seconds: float) -> dict[int, str]:
    """Until every rank has answered; returns what those said that have no trace. Raises DtobsError without a trace."""
    deadline = time.monotonic() + seconds
    while True:
        traces, refusals = answers(run, request)
        missing = [rank for rank in request.ranks if rank not in traces and rank not in refusals]
        if not missing:
            break
        why = _hopeless(run, request, missing, deadline, seconds)
        if why:
            refusals |= dict.fromkeys(missing, why)
            break
        time.sleep(_POLL_SECONDS)
    if not traces:
        said = next(iter(refusals.values()))
        raise DtobsError(f"{run.root}: {ranks_do(refusals, 'have')} no trace: {said}")
    return refusals


def _hopeless(run: RunDirectory, request: Request, missing: list[int], deadline: float, seconds: float) -> str:
    """Why those that are missing will not answer any more; "" while they may."""
    view = load_run(run.root, with_capture=False)
    gone = [r for r in missing if r not in view.ranks or ((p := view.process(r)) is not None and not p.alive)]
    if len(gone) == len(missing):
        return f"the run ended before step {request.last + 1}"
    if time.monotonic() > deadline:
        at = {int(view.page(rank)["step"]) for rank in missing if rank in view.ranks}
        return f"it did not answer in {count(round(seconds), 'second')} (now in step {max(at, default=0)})"
    return ""


def _ranks(given: str | None) -> tuple[int, ...]:
    if given is None:
        return ()
    if not re.fullmatch(r"\d{1,7}(,\d{1,7})*", given):
        raise UsageError(f"--ranks {given}: give numbers with commas between them, such as 0,3")
    return tuple(sorted({int(rank) for rank in given.split(",")}))


def _say(text: str) -> None:
    print(f"dtobs: {text}", file=sys.stderr)
