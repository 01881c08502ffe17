"""Do a suspect step of a run again, twice, from the checkpoint before it: transient, persistent, or software.

RUN is a run directory. The step is that of the first silent error that was found in it, or --step. --restart CMD
starts the training from the checkpoint before that step, with the same data, and numbers its steps as the run did
(session.step(n)); for runs of runtime.train it is worked out. Both replays are ended after the step, and what each
rank's parameters were after it is compared to the bit. Nothing is written to RUN.

examples:
  dtobs replay runs/20261120T120000Z-run
  dtobs replay runs/llama --step 4711 --restart "torchrun --nproc-per-node 8 train.py --resume ckpt-4700"
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from dtobs.cli import Exit
from dtobs.cli._observed import observe
from dtobs.compare.replay import judge
from dtobs.errors import UsageError, opening
from dtobs.findings import CATALOGUE
from dtobs.recording.journal import read_journal
from dtobs.recording.rundir import RunDirectory
from dtobs.recording.view import load_run

_NOT_ASKED_AGAIN = {
    "run.run_dir",
    "run.tui",
    "run.prove",
    "run.root",
    "checkpoint.resume",
    "checkpoint.every",
    "checkpoint.last",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--step", type=int, help="the step (default: that of the first silent error found)")
    parser.add_argument("--timeout", type=float, default=1800.0, metavar="S", help="seconds for each replay (1800)")
    parser.add_argument("--json", action="store_true", help="print JSON (dtobs.replay/1)")
    parser.add_argument("--restart", metavar="CMD", help="restarts the training before the step, in quotes")


def run(args: argparse.Namespace) -> int:
    """Run both replays, compare, print."""
    with opening(args.run):
        view = load_run(args.run, with_capture=False)
    step = args.step if args.step is not None else _suspect(args.run)
    words = shlex.split(args.restart) if args.restart else []
    with tempfile.TemporaryDirectory(prefix="dtobs-replay-") as scratch:
        replays = []
        for name in ("first", "second"):
            folder = Path(scratch) / name
            command = words or _of_the_runtime(args.run, view.info, view.world_size, step, folder)
            replays.append(observe(command, folder, args.timeout, until=step))
        found = judge(view, replays[0], replays[1], step)
    print(json.dumps(found.to_json()) if args.json else f"{found.verdict}: {found.summary}")
    return Exit.WARNING if found.verdict in ("transient", "persistent", "software") else Exit.NOTHING_FOUND


def _suspect(path: Path) -> int:
    """The earliest step of a silent error. Raises UsageError when none was found."""
    journal = read_journal(RunDirectory(path).findings)
    steps = [
        entry.finding.step
        for entry in journal
        if entry.finding.step is not None and CATALOGUE[entry.finding.code].family == "silent"
    ]
    if not steps:
        raise UsageError(f"no silent error was found in {path}: say which step with --step")
    return min(steps)


def _of_the_runtime(path: Path, info: dict[str, Any], world: int, step: int, folder: Path) -> list[str]:
    """The command that trained, from the newest checkpoint before `step`, or its beginning. Raises UsageError."""
    config = info.get("config")
    if not isinstance(config, dict) or not isinstance(config.get("parallel"), dict):
        raise UsageError(f"{path} was not written by runtime.train: say how to restart it with --restart")
    flags = []
    for section, options in config.items():
        for name, value in options.items() if isinstance(options, dict) else ():
            if f"{section}.{name}" not in _NOT_ASKED_AGAIN and value not in (None, ""):
                flags += [f"--{section}.{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    saved = sorted(int(p.name.removeprefix("step-")) for p in (path / "checkpoints").glob("step-[0-9]*"))
    before = [number for number in saved if number < step]
    if before:
        flags += ["--checkpoint.resume", str((path / "checkpoints" / f"step-{before[-1]:08d}").absolute())]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    flags += ["--run.run_dir", str(folder), "--checkpoint.every", "0", "--checkpoint.last", "false"]
    return [*launch, "-m", "runtime.train", *flags]
