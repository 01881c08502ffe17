"""Say what slowness costs a job, and what fixing it would give back.

TARGET is a table of operations (CSV or Parquet with the columns step, rank, dp, pp, vpp, microbatch, op, start_ns,
duration_ns) or a run directory of ours. The operations are simulated over what each depends on, as they were and with
equal durations: S is how many times longer the job takes, then by kind of operation, stage, rank and data rank; and how
much of the waste is returned when the slowest 3 % of the ranks, or the last stage, are fixed.

examples:
  dtobs whatif operations.csv
  dtobs whatif operations.parquet --json
  dtobs whatif runs/20261120T120000Z-run
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dtobs.errors import TargetError, opening
from dtobs.findings import exit_code
from dtobs.recording.view import load_run
from dtobs.timeline.operations import from_run, read_table
from dtobs.timeline.whatif import WhatIf, whatif
from dtobs.words import duration_text, runs_text

_SHOWN = 8


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("target", type=Path, metavar="TARGET", help="table (.csv, .parquet) or run directory")
    parser.add_argument("--json", action="store_true", help="print JSON (dtobs.whatif/1)")


def run(args: argparse.Namespace) -> int:
    """Simulate and print."""
    target: Path = args.target
    if target.is_dir():
        with opening(target):
            ops = from_run(load_run(target, with_capture=False))
    else:
        ops = read_table(target)
    try:
        found = whatif(ops)
    except TargetError as error:
        raise TargetError(f"{target}: {error}") from error
    print(json.dumps(found.to_json(), allow_nan=False) if args.json else _text(found))
    return exit_code(found.findings)


def _text(found: WhatIf) -> str:
    lines = [f"{f.severity}, {f.confidence}: {f.summary}\n  next: {f.next_step}" for f in found.findings]
    actual, simulated, ideal = (duration_text(ns / 1e9) for ns in (found.actual_ns, found.simulated_ns, found.ideal_ns))
    lines += lines and [""]
    lines.append(f"S = {found.slowdown:.3f}  ({simulated} simulated, {ideal} ideal, {actual} recorded)")
    for title, table in (
        ("op", found.by_op),
        ("stage", found.by_stage),
        ("data rank", found.by_dp),
        ("rank", found.by_rank),
    ):
        worst = sorted(table.items(), key=lambda item: -item[1])[:_SHOWN]
        lines.append(f"by {title}: " + ", ".join(f"{name} {value:.3f}" for name, value in worst))
    lines.append(
        f"fixing the slowest ranks ({runs_text(found.worst)}) returns {found.fix['worst_workers']:.0%} of the waste"
    )
    lines.append(
        f"fixing the last stage returns {found.fix['last_stage']:.0%}, communication {found.fix['communication']:.0%}"
    )
    return "\n".join(lines)
