"""Say where the processes of a job that runs stand, though nobody prepared it: read-only.

PID is a rank, or a launcher above the ranks (torchrun, srun's shell, a script that spawned them); without one, the
ranks of this host are found by RANK in their environment. Looks three times at /proc and at their Python stacks
(py-spy reads them from outside and does not stop them), asks NCCL RAS where NCCL is loaded, and the Flight Recorder
where TORCH_NCCL_DEBUG_INFO_PIPE_FILE is set. Nothing is put into the processes, unless --remote-exec asks for it.
Ends with 0 (nothing found), 3 (warnings) or 4 (critical).

examples:
  dtobs attach
  dtobs attach 4711 4712
  dtobs attach --json $(pgrep -f train.py) | jq .verdict
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys

from dtobs.diagnose.attached import SECONDS, diagnose_attached, find_processes, told_by_dumps
from dtobs.errors import UsageError
from dtobs.findings import exit_code
from dtobs.host.remote_exec import remote_dumps
from dtobs.reports import json, text


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("pids", nargs="*", type=int, metavar="PID", help="ranks, or a launcher above them")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="look three times within so many seconds (%(default)s)"
    )
    parser.add_argument(
        "--remote-exec",
        action="store_true",
        help="ask the ranks' own Python for their Flight Recorder (sys.remote_exec, Python 3.14 on both sides)",
    )
    parser.add_argument("--json", action="store_true", help="print the diagnosis as JSON (dtobs.diagnosis/1)")


def run(args: argparse.Namespace) -> int:
    """Look, compare and print."""
    if not 0.2 <= args.seconds <= 3600:
        raise UsageError("--seconds is between 0.2 and 3600")
    processes = find_processes(args.pids)
    extra = told_by_dumps(remote_dumps(processes)) if args.remote_exec else ()
    diagnosis = diagnose_attached(processes, args.seconds, extra=extra)
    if args.json:
        print(json.render(diagnosis), end="")
    else:
        width = shutil.get_terminal_size((100, 24)).columns
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        print(text.render(diagnosis, width, colour=colour), end="")
    return exit_code(diagnosis.findings)
