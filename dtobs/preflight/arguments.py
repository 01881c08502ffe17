"""The command's arguments; those that torchrun has too are named as there. Imports no torch, for a quick --help."""

from __future__ import annotations

import argparse
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Add them."""
    parser.add_argument("--nnodes", type=int, default=1, metavar="N", help="number of nodes (1)")
    parser.add_argument("--node-rank", type=int, default=0, metavar="K", help="which of them this is (0)")
    parser.add_argument(
        "--nproc-per-node", type=int, metavar="M", help="ranks a node (one a device; without devices 2)"
    )
    parser.add_argument("--master-addr", default="127.0.0.1", metavar="HOST", help="node 0, as the others reach it")
    parser.add_argument("--master-port", type=int, metavar="PORT", help="port there (29500; one node: any free one)")
    parser.add_argument("--hosts", metavar="A,B,…", help="names of the nodes in order, to name one that never comes")
    parser.add_argument("--backend", choices=("auto", "gloo", "nccl"), default="auto", help="what to test (auto)")
    parser.add_argument("--run-dir", type=Path, default=Path("runs"), metavar="DIR", help="where runs go (runs)")
    parser.add_argument(
        "--join-timeout", type=float, default=60.0, metavar="S", help="for all ranks to come, after the first (60)"
    )
    parser.add_argument(
        "--silence", type=float, default=15.0, metavar="S", help="without a sign of life: a rank has stopped (15)"
    )
    parser.add_argument("--timeout", type=float, default=180.0, metavar="S", help="for everything (180)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--follow", action="store_true", help=argparse.SUPPRESS)  # a rank that does not report
