"""Show a run live on the terminal: every rank's state, time, norms and memory, and what was found.

TARGET is a run directory or the address of a monitor (http://HOST:PORT); without one, the newest run below ./runs.
It only reads, so any number of viewers may look.
Keys: q quit, space pause, s sort, r reverse, f only suspicious ranks, h history, Enter details, ? help. With --once
or --json it prints what it sees and ends with 0 (nothing found), 3 (warnings) or 4 (critical).

examples:
  dtobs top
  dtobs top runs/20261120T120000Z-run --once
  dtobs top http://127.0.0.1:9400
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from dtobs.cli import Exit
from dtobs.errors import DependencyMissing, UsageError
from dtobs.findings import exit_code
from dtobs.tui.model import ScreenFrame
from dtobs.tui.order import KEYS, Order
from dtobs.tui.plain import render
from dtobs.tui.source import open_source


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "target", nargs="?", metavar="TARGET", help="run directory or monitor address (default: the newest in ./runs)"
    )
    parser.add_argument("--once", action="store_true", help="print one look as text and end")
    parser.add_argument("--json", action="store_true", help="print one look as JSON and end")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between looks (1)")
    parser.add_argument("--sort", choices=list(KEYS), default="rank", help="column to sort by (rank)")
    parser.add_argument("--light", action="store_true", help="for a light terminal (default: where COLORFGBG says so)")
    parser.add_argument("--exit-with-run", action="store_true", help="end when the run has ended")


def run(args: argparse.Namespace) -> int:
    """Show the run until the user quits; with --once or --json, once."""
    if not 0.1 <= args.interval <= 3600:
        raise UsageError(f"--interval {args.interval:g}: give seconds between 0.1 and 3600")
    source = open_source(args.target, Path.cwd())
    if args.json or args.once:
        frame = source.look()
        if args.json:
            print(json.dumps(frame.to_json(), indent=1, allow_nan=False))
        else:
            width = shutil.get_terminal_size((120, 24)).columns
            print(render(frame, width, Order(args.sort)), end="")
        return verdict(frame)
    if find_spec("textual") is None:
        raise DependencyMissing("textual", "tui")
    if not (sys.stdout.isatty() and sys.stdin.isatty()):
        raise UsageError("the live screen needs a terminal; use --once or --json to print one look")
    source.look()  # a target that is no run directory is an error before the screen opens
    from dtobs.tui import palette

    if args.light or palette.is_light(os.environ):
        palette.use_light()
    from dtobs.tui.app import TopApp

    app = TopApp(source, interval=args.interval, order=Order(args.sort), exit_with_run=args.exit_with_run)
    app.run()
    return app.return_code or Exit.NOTHING_FOUND


def verdict(frame: ScreenFrame) -> int:
    """The exit code of one look."""
    return exit_code(frame.findings)
