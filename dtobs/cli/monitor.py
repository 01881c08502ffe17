"""Watch a run from this node: findings, captures of stalls, and metrics over HTTP.

Training starts the monitor by itself; this is for a run that was started without one (DTOBS_MONITOR=0), and for
another address. It ends when the ranks of the node are gone.

example:
  dtobs monitor runs/20261120T120000Z-run --listen 127.0.0.1:9400
"""

from __future__ import annotations

import argparse

from dtobs.errors import UsageError
from dtobs.monitor import app
from dtobs.recording.rundir import RunDirectory


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    app.configure(parser)


def run(args: argparse.Namespace) -> int:
    """Watch until the ranks are gone."""
    given = RunDirectory(args.run_dir)
    if args.run_dir.is_dir() and not given.nodes() and not given.run_json.exists():
        raise UsageError(f"{args.run_dir} is no run directory: it holds neither run.json nor nodes/")
    app.set_up_log()
    return app.start(args)
