"""Serve what is known of a run, dumps or logs to an agent: a read-only MCP server on standard input and output.

TARGET is what `dtobs diagnose` takes. The tools are diagnose, findings, ranks, timeline and metrics; every answer is
bounded in size. It needs the official SDK: pip install 'dtobs[mcp]'. With --json it serves nothing and prints the entry
that a client's configuration needs.

examples:
  dtobs mcp runs/20261120T120000Z-run
  claude mcp add dtobs -- dtobs mcp /data/logs
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from dtobs.cli import Exit
from dtobs.errors import TargetError, exists
from dtobs.mcp.server import server
from dtobs.nodes.remote import is_address


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("targets", nargs="+", metavar="TARGET", help="run directory, dumps, logs or addresses")
    parser.add_argument("--json", action="store_true", help="print a client's configuration for this server, and end")


def run(args: argparse.Namespace) -> int:
    """Serve until standard input ends."""
    for target in args.targets:
        if not is_address(target) and not exists(Path(target)):
            raise TargetError(f"there is no {target}: give a run directory, a folder of dumps, or logs")
    if args.json:
        places = [target if is_address(target) else str(Path(target).absolute()) for target in args.targets]
        entry = {"command": sys.executable, "args": ["-m", "dtobs", "mcp", *places]}
        print(json.dumps({"mcpServers": {"dtobs": entry}}, indent=1))
        return Exit.NOTHING_FOUND
    server(args.targets).run("stdio")
    return Exit.NOTHING_FOUND
