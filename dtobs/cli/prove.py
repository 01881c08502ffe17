"""Prove that a job computes what one rank computes, before it trains for days: both run a few steps and are compared.

CMD is the job, --against the same training on one rank (or on fewer). Without --against a torchrun command is run again
with one process. Both are observed as with dtobs run, ended after --steps steps, and held against each other as by
dtobs compare: initial values, batch, weight of the losses, learning rate, gradients of every parameter, losses. Give
both the same samples in each step. `runtime.train` proves its layouts itself, with --prove.

examples:
  dtobs prove -- torchrun --nproc-per-node 4 train.py --global-batch 32
  dtobs prove --against "python train.py --batch 32" -- torchrun --nproc-per-node 4 train.py --batch 8
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import tempfile
from pathlib import Path

from dtobs.cli import Exit
from dtobs.cli._observed import observe
from dtobs.compare.job import read_job
from dtobs.compare.judge import compare
from dtobs.compare.picture import text
from dtobs.errors import UsageError

_PROCESSES = re.compile(r"(--nproc[-_]per[-_]node|--nnodes)(=|$)")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--against", metavar="CMD", help="the same training on one rank, as one word in quotes")
    parser.add_argument("--steps", type=int, default=8, help="steps to compare (8)")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds for each of the two (600)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep both recordings below DIR")
    parser.add_argument("--json", action="store_true", help="print JSON (dtobs.compare/1)")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD …", help="the job that is to be proved")


def run(args: argparse.Namespace) -> int:
    """Run both, compare, print."""
    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not words:
        raise UsageError("say what to prove: dtobs prove -- torchrun --nproc-per-node 4 train.py")
    if args.steps < 1 or not 0 < args.timeout < 1e6:
        raise UsageError(f"--steps {args.steps} --timeout {args.timeout}: give positive numbers")
    reference = shlex.split(args.against) if args.against else alone(words)
    with tempfile.TemporaryDirectory(prefix="dtobs-prove-") as scratch:
        folder: Path = args.keep or Path(scratch)
        one, job = (
            read_job(observe(command, folder / name, args.timeout, steps=args.steps), shlex.join(command))
            for name, command in (("one", reference), ("job", words))
        )
    found = compare(one, job)
    if args.json:
        print(json.dumps(found.to_json(), allow_nan=False))
    else:
        print(text(found, shutil.get_terminal_size((100, 24)).columns), end="")
    return Exit.WARNING if found.verdict == "parts" else Exit.NOTHING_FOUND


def alone(words: list[str]) -> list[str]:
    """A torchrun command with one process on one node. Raises UsageError when it says nothing of processes."""
    found, changed, skip = [], False, False
    for word in words:
        match = _PROCESSES.match(word)
        if skip:
            found.append("1")
            skip = False
        elif match:
            found.append(match[1] + ("=1" if match[2] else ""))
            skip, changed = not match[2], True
        else:
            found.append(word)
    if not changed:
        raise UsageError("CMD does not say --nproc-per-node: name the training on one rank with --against")
    return found
