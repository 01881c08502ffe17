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
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dtobs.cli import Exit
from dtobs.compare.job import Job, read_job
from dtobs.compare.judge import compare
from dtobs.compare.picture import text
from dtobs.errors import DtobsError, TargetError, UsageError, opening
from dtobs.integrations.launch import environment
from dtobs.recording.view import load_run

_LOOK_SECONDS = 0.25
_GRACE_SECONDS = 10.0
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
        one = _observed(reference, folder / "one", args.steps, args.timeout)
        job = _observed(words, folder / "job", args.steps, args.timeout)
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


def _observed(words: list[str], run_dir: Path, steps: int, timeout: float) -> Job:
    """Run a command until every rank has finished `steps` steps. Raises DtobsError when it does not get there."""
    print(f"dtobs: running {shlex.join(words)}", file=sys.stderr, flush=True)
    run_dir.mkdir(parents=True, exist_ok=True)
    values = environment(os.environ, run_dir, "prove", None)
    values |= {"DTOBS_PROBES": "ledger=all", "DTOBS_MONITOR": "0"}
    with (run_dir / "output.log").open("wb") as output:
        try:
            process = subprocess.Popen(words, stdout=output, stderr=output, env=values, start_new_session=True)
        except OSError as error:
            raise UsageError(f"cannot run {words[0]!r}: {error.strerror}") from error
        try:
            done = _wait(process, run_dir, steps, timeout)
        finally:
            _end(process)
    if done < 1:
        tail = (run_dir / "output.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        raise DtobsError(f"{shlex.join(words)} finished no step: {tail[0] if tail else 'it printed nothing'}")
    with opening(run_dir):
        return read_job(load_run(run_dir, with_capture=False), shlex.join(words))


def _wait(process: subprocess.Popen[bytes], run_dir: Path, steps: int, timeout: float) -> int:
    """Until all ranks have done `steps`, the command has ended or the time is over; how many all have done."""
    deadline, done = time.monotonic() + timeout, 0
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        try:
            view = load_run(run_dir, with_capture=False)
        except TargetError:
            view = None
        if view is not None and len(view.pages) and not view.missing_ranks:
            done = int(view.pages["steps_done"].min())
        if ended or done > steps:  # one more has begun, so that the last one is written whole
            return done
        time.sleep(_LOOK_SECONDS)
    return done


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the command's process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(_GRACE_SECONDS)
        except (ProcessLookupError, PermissionError):
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait()
