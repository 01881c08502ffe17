"""Say from Kineto traces where each rank's time goes, and who makes the others wait.

TARGET is a folder or files: torch.profiler's Chrome traces (.json, .json.gz, any names) of one rank or many.
For each rank: compute, communication, how much of it is exposed, and why the device idles; for the ranks together: the
collectives and the straggler. --compare says what became faster or slower; -o writes all ranks on one clock for
ui.perfetto.dev.

examples:
  dtobs trace traces/
  dtobs trace traces/ --window steps --json
  dtobs trace traces/ -o merged.json.gz --html report.html
  dtobs trace --compare before/ after/
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from dtobs.cli import Exit
from dtobs.errors import UsageError
from dtobs.findings import exit_code
from dtobs.reports.trace_html import render as html
from dtobs.reports.trace_text import render, render_comparison
from dtobs.timeline.kineto.analyse import JobTrace, analyse
from dtobs.timeline.kineto.compare import compare
from dtobs.timeline.kineto.figures import WINDOWS
from dtobs.timeline.kineto.merge import write

_FORMATS = (".json", ".json.gz")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("targets", nargs="*", type=Path, metavar="TARGET", help="folder of traces, or trace files")
    parser.add_argument("--json", action="store_true", help="print JSON (dtobs.trace/1, dtobs.trace-compare/1)")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"), help="before and after, folders or files")
    window = "all of it (default), or what was launched before the last ProfilerStep began"
    parser.add_argument("--window", choices=WINDOWS, default="whole", help=window)
    parser.add_argument("-o", "--output", type=Path, metavar="OUT", help="write all ranks as one .json or .json.gz")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report")


def run(args: argparse.Namespace) -> int:
    """Analyse, and write where asked."""
    if bool(args.targets) == bool(args.compare):
        raise UsageError("give a folder or files of traces, or --compare A B")
    if args.output is not None and not args.output.name.endswith(_FORMATS):
        raise UsageError(f"-o {args.output}: give a name that ends in {' or '.join(_FORMATS)}")
    if args.compare:
        if args.output or args.html:
            raise UsageError("--compare writes no file: give -o or --html with one set of traces")
        return _compare(args)
    found = analyse(args.targets, args.window)
    if args.json:
        _notes(found, "")
        print(json.dumps(found.to_json(), allow_nan=False))
    else:
        print(render(found), end="")
    if args.output is not None:
        write(found, args.output)
    if args.html is not None:
        _write(args.html, html(found, ", ".join(str(t) for t in args.targets)))
    if not args.json:
        for path in filter(None, (args.output, args.html)):
            print(f"written: {path}")
    return exit_code(found.findings)


def _compare(args: argparse.Namespace) -> int:
    before, after = (analyse([target], args.window) for target in args.compare)
    found = compare(before, after)
    if args.json:
        _notes(before, "A: ")
        _notes(after, "B: ")
        print(json.dumps(found, allow_nan=False))
    else:
        print(render_comparison(found), end="")
    return Exit.NOTHING_FOUND


def _notes(found: JobTrace, where: str) -> None:
    """What could not be read belongs on the error stream as well: JSON goes to programs."""
    for note in found.notes:
        print(f"dtobs: {where}{note}", file=sys.stderr)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
