"""Say which rank, which operation and which line of code a run hangs, crashes or goes wrong at.

TARGET is a run directory (live, hung or dead), a capture inside one, the addresses of a run's monitors
(http://HOST:PORT, as in its monitor.json), or what any job left: PyTorch Flight Recorder dumps (pickle or JSON, names
that end in the rank), console logs (files, folders, gzip, - for standard input, several at once), stacks by py-spy or
faulthandler, folders of torch.distributed.debug, answers of NCCL RAS, sacct tables and Kubernetes events; what lies in
one folder is combined. Without a target, the newest run below ./runs. A run that lives on this host and does not move
is asked for its stacks. Ends with 0 (nothing found), 3 (warnings) or 4 (critical).

examples:
  dtobs diagnose
  dtobs diagnose dumps/
  cat slurm-123.out | dtobs diagnose -
  dtobs diagnose logs/
  dtobs diagnose --ras localhost:28028
  dtobs diagnose http://127.0.0.1:9400
  dtobs diagnose runs/20261120T120000Z-run --html report.html
  dtobs diagnose runs/20261120T120000Z-run --json | jq .verdict
  dtobs diagnose --json-schema > diagnosis.schema.json
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from json import dumps as dump_json
from pathlib import Path

from dtobs.cli import Exit
from dtobs.diagnose import Diagnosis, diagnose_ras, diagnose_target
from dtobs.diagnose.advice import advise
from dtobs.diagnose.gather import TakeCapture
from dtobs.errors import UsageError
from dtobs.findings import exit_code
from dtobs.monitor.capture import capture_ranks
from dtobs.reports import html, json, text
from dtobs.reports.sanitize import printable
from dtobs.tui.source import newest_run


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="TARGET",
        help="run directory, capture, folder of dumps, logs, or monitor addresses (default: the newest in ./runs)",
    )
    parser.add_argument("--json", action="store_true", help="print the diagnosis as JSON (dtobs.diagnosis/1)")
    parser.add_argument("--json-schema", action="store_true", help="print the JSON schema of --json, and end")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a report that a browser opens")
    parser.add_argument(
        "--ras", metavar="WHERE", help="judge NCCL RAS instead: a file, a folder of samples, or HOST:PORT"
    )
    parser.add_argument(
        "--advise", action="store_true", help="say whether to start again: exit code 0 yes, 3 unsure, 4 no"
    )
    parser.add_argument(
        "--earlier", action="append", default=[], metavar="TARGET", help="with --advise: an attempt before"
    )
    parser.add_argument("--no-capture", action="store_true", help="do not ask living ranks for their stacks")


def run(args: argparse.Namespace) -> int:
    """Diagnose and print."""
    if args.json_schema:
        print(json.schema(), end="")
        return Exit.NOTHING_FOUND
    diagnosis = (
        diagnose_ras(args.ras)
        if args.ras is not None
        else _diagnose(args.targets, None if args.no_capture else capture_ranks)
    )
    if args.advise:
        return _advise(diagnosis, [_diagnose([earlier], None) for earlier in args.earlier], as_json=args.json)
    if args.html is not None:
        try:
            args.html.write_text(html.render(diagnosis), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {args.html}: {error.strerror}") from error
    if args.json:
        print(json.render(diagnosis), end="")
    else:
        terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size((100, 24)).columns
        print(text.render(diagnosis, width, colour=terminal and "NO_COLOR" not in os.environ), end="")
        if args.html is not None:
            print(f"\nwritten: {args.html}")
    return exit_code(diagnosis.findings)


def _advise(diagnosis: Diagnosis, earlier: list[Diagnosis], *, as_json: bool) -> int:
    """Print the advice; its exit code is for requeue scripts."""
    advice = advise(diagnosis, earlier)
    if as_json:
        print(dump_json(advice.to_json(), indent=1))
    else:
        print(printable(f"restart: {advice.restart} ({advice.reason})"))
        print(f"cause: {advice.cause}")
        if advice.leave_out:
            print(printable(f"leave out: {', '.join(advice.leave_out)}"))
    return {"yes": Exit.NOTHING_FOUND, "unsure": Exit.WARNING}.get(advice.restart, Exit.CRITICAL)


def _diagnose(targets: list[str], take_capture: TakeCapture | None) -> Diagnosis:
    """Look at what was named, or at the newest run. Raises DtobsError when that is nothing to look at."""
    return diagnose_target(targets or [str(newest_run(Path.cwd()))], take_capture)
