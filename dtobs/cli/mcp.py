"""Serve what is known of a run, dumps or logs to an agent: a read-only MCP server on standard input and output.

TARGET is what `dtobs diagnose` takes. The tools are diagnose, findings, ranks, timeline and metrics; every answer is
bounded in size. It needs the official SDK: pip install 'dtobs[mcp]'.

examples:
  dtobs mcp runs/20261120T120000Z-run
  claude mcp add dtobs -- dtobs mcp /data/logs
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dtobs.cli import Exit
from dtobs.errors import TargetError, exists
from dtobs.mcp.server import server
from dtobs.nodes.remote import is_address


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("targets", nargs="+", metavar="TARGET", help="run directory, dumps, logs or addresses")


def run(args: argparse.Namespace) -> int:
    """Serve until standard input ends."""
    for target in args.targets:
        if not is_address(target) and not exists(Path(target)):
            raise TargetError(f"there is no {target}: give a run directory, a folder of dumps, or logs")
    server(args.targets).run("stdio")
    return Exit.NOTHING_FOUND
