"""Say where two runs part: the first step, the first quantity and parameter, and the reason where it is known.

A and B are run directories of ours, of any layouts: one rank against eight, before and after a change. What rounding
explains is not called a difference. Runs of one rank and of many are comparable when both read the same samples in each
step. The more of the beginning is recorded, the better: 50 steps are enough.

examples:
  dtobs compare runs/one-rank runs/eight-ranks
  dtobs compare runs/before runs/after --json
  dtobs compare runs/before runs/after -o difference.svg
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from dtobs.cli import Exit
from dtobs.compare.job import ComparedJob, read_job
from dtobs.compare.judge import compare
from dtobs.compare.picture import svg, text
from dtobs.errors import UsageError, opening
from dtobs.recording.view import load_run


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("a", type=Path, metavar="A", help="run directory")
    parser.add_argument("b", type=Path, metavar="B", help="run directory that is held against A")
    parser.add_argument("--json", action="store_true", help="print JSON (dtobs.compare/1)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.svg", help="write a picture")


def run(args: argparse.Namespace) -> int:
    """Compare the two runs and print the result. Returns the exit code; raises UsageError for a bad `-o`."""
    output: Path | None = args.output
    if output is not None and output.suffix != ".svg":
        raise UsageError(f"-o {output}: give a name that ends in .svg")
    found = compare(_read(args.a), _read(args.b))
    if output is not None:
        output.write_text(svg(found), encoding="utf-8")
    if args.json:
        print(json.dumps(found.to_json(), allow_nan=False))
    else:
        print(text(found, shutil.get_terminal_size((100, 24)).columns), end="")
        if output is not None:
            print(f"written: {output}")
    return Exit.WARNING if found.verdict == "parts" else Exit.NOTHING_FOUND


def _read(path: Path) -> ComparedJob:
    with opening(path):
        return read_job(load_run(path, with_capture=False), str(path))
