"""Run a training command observed, without a line of dtobs in it.

Every Python process below CMD that trains (torchrun's workers, or the script itself) attaches when it has its process
group, or builds its first optimizer: steps, phases, collectives, gradients and parameters are recorded as with
dtobs.attach(model, optimizer). What CMD prints and its exit code are its own. Standard error names the run directory at
the start, and at the end what was found. With --tui the terminal shows the run live, and the output of CMD goes to
output.log in the run directory. With --json standard output is one JSON object at the end (dtobs.run/1: run_dir,
exit_code, and the diagnosis as `dtobs diagnose --json` gives it), and the output of CMD goes to standard error.

examples:
  dtobs run -- torchrun --nproc-per-node 2 train.py --epochs 3
  dtobs run --name llama --tui -- python train.py
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

from dtobs.codec import finite
from dtobs.detectors.hangs import rendezvous_incomplete
from dtobs.diagnose import diagnose, gather
from dtobs.diagnose.model import Diagnosis
from dtobs.errors import DependencyMissing, DtobsError, RecordingDisabled, TargetError, UsageError
from dtobs.expectations import EXPECTATIONS
from dtobs.findings import Severity, Trait
from dtobs.integrations.launch import UNSEEN, Command, environment
from dtobs.recording.arrivals import note_living, read_arrivals
from dtobs.recording.policy import VARIABLE, Policy
from dtobs.recording.rundir import RunDirectory, new_run_path
from dtobs.recording.summary import summarise
from dtobs.recording.view import living, load_run
from dtobs.words import count, duration_text

_LOOK_SECONDS = 2.0
_LAST_WORDS_SECONDS = 3.0
_MAX_PAST = 3
_STDERR = 2


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--name", default="run", help="name of the run directory: runs/<UTC time>-NAME (run)")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="record to DIR instead")
    parser.add_argument(
        "--hang-timeout", type=float, metavar="S", help="seconds without progress that are a hang (adapts)"
    )
    parser.add_argument(
        "--on-hang", metavar="POLICY", help="report, abort (a launcher restarts) or command:PROGRAM ARGUMENTS"
    )
    parser.add_argument(
        "--expect",
        action="append",
        choices=EXPECTATIONS,
        metavar="WORD",
        help="declare what is done on purpose; may be given more than once. "
        + "; ".join(f"{word}: {each.says}" for word, each in EXPECTATIONS.items()),
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--tui", action="store_true", help="show the run live in this terminal")
    shown.add_argument("--json", action="store_true", help="print what was found as JSON at the end")
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- CMD …",
        help="the command that trains, with its flags",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; returns its exit code, 128 + N when signal N ended it."""
    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not words:
        raise UsageError("say what to run: dtobs run -- torchrun --nproc-per-node 2 train.py")
    if args.hang_timeout is not None and not 0 < args.hang_timeout < 1e6:
        raise UsageError(f"--hang-timeout {args.hang_timeout}: give a positive number of seconds")
    if args.on_hang is not None:
        Policy.parse(args.on_hang)
        os.environ[VARIABLE] = args.on_hang  # what we start has it
    if args.expect is not None:
        os.environ["DTOBS_EXPECT"] = ",".join(args.expect)  # as above
    if args.tui:
        _check_terminal()
    given = args.run_dir or os.environ.get("DTOBS_RUN_DIR")
    root = Path(given).absolute() if given else new_run_path(args.name)
    _refuse_a_live_run(root)
    recorded = _recordings(root)
    new = [folder for folder in (root, *root.parents) if not folder.exists()]
    if not _make(root):
        code = Command(words, {**os.environ, "DTOBS_DISABLE": "1"}).run(_stdout(args))
        if args.json:
            _print_json(root, code, None)
        return code
    try:
        with tempfile.TemporaryDirectory(prefix="dtobs-", ignore_cleanup_errors=True) as folder:
            unseen = Path(folder, "unseen")
            values = {**environment(os.environ, root, args.name, args.hang_timeout), UNSEEN: str(unseen)}
            code = _train(Command(words, values), root, args)
            spawned = len(set(unseen.read_text().split())) if unseen.exists() else 0
        records = not recorded or _recordings(root) != recorded
        if records:
            _note_exit(RunDirectory(root), code)
        diagnosis = _conclude(root if records else None, words, code, spawned)
        if args.json:
            _print_json(root, code, diagnosis)
    finally:
        with contextlib.suppress(OSError):  # where nothing was recorded they are empty
            for made in new:
                made.rmdir()
    return code


def _note_exit(run: RunDirectory, code: int) -> None:
    """Keep how the command ended: where it failed and no rank recorded why, it is all there is."""
    with contextlib.suppress(TargetError, RecordingDisabled):
        info = run.read_run()
        if info and info.get("exit_code", 0) != code:
            run.write_run(info | {"exit_code": code})


def _train(command: Command, root: Path, args: argparse.Namespace) -> int:
    if args.tui:
        return _with_screen(command, RunDirectory(root), args.name)
    _say(f"recording to {root}; 'dtobs top {root}' shows it live")
    Thread(target=_watch_rendezvous, args=(root,), daemon=True).start()
    return command.run(_stdout(args))


def _stdout(args: argparse.Namespace) -> int | None:
    """Where the command's output goes, if not to our own standard output."""
    return _STDERR if args.json else None


def _print_json(root: Path, code: int, diagnosis: Diagnosis | None) -> None:
    said = {
        "schema": "dtobs.run/1",
        "run_dir": str(root) if diagnosis is not None else None,
        "exit_code": code,
        "diagnosis": finite(diagnosis.to_json()) if diagnosis is not None else None,
    }
    print(json.dumps(said, indent=1, default=str, allow_nan=False))


def _refuse_a_live_run(root: Path) -> None:
    """Two jobs in one directory would write over each other. Raises UsageError when one trains there."""
    for rank, pid in living(root).items():
        raise UsageError(f"{root} belongs to a job that still runs (rank {rank} is process {pid}): name another")


def _recordings(root: Path) -> int:
    """How many ranks of how many attempts have recorded in a directory: another job may have, before."""
    return sum(1 for _ in root.glob("ranks/*/meta-*.jsonl"))


def _make(root: Path) -> bool:
    """Make the run directory; whether that worked. Training matters more than recording it."""
    try:
        RunDirectory(root).create()
    except RecordingDisabled as error:
        _say(f"not recording: {error}; give --run-dir a folder that you may write to. The command runs without dtobs")
        return False
    return True


def _check_terminal() -> None:
    if find_spec("textual") is None:
        raise DependencyMissing("textual", "tui")
    if not (sys.stdout.isatty() and sys.stdin.isatty()):
        raise UsageError("--tui needs a terminal; without it the command runs as it is")


def _with_screen(command: Command, run: RunDirectory, name: str) -> int:
    run.create()
    if not run.run_json.exists():
        run.write_run({"name": name})  # the screen has a run to look at before the first rank is there
    viewer = [sys.executable, "-m", "dtobs", "top", str(run.root), "--exit-with-run"]
    return command.with_screen(viewer, run.root / "output.log")


def _watch_rendezvous(root: Path) -> None:
    """Say once who is missing while the ranks wait for their process group, and keep note of who lives.

    No monitor runs before the group is there.
    """
    said = False
    while not any((root / "nodes").glob("*")):
        time.sleep(_LOOK_SECONDS)
        try:
            note_living(root)
            found = rendezvous_incomplete.find(load_run(root))
        except (DtobsError, OSError):  # nobody has started yet, or the folder is being changed
            continue
        if found and not said:
            _say(f"{found[0].code}: {found[0].summary}")
            said = True


def _conclude(root: Path | None, words: list[str], code: int, spawned: int) -> Diagnosis | None:
    """Say what was found, if anything, and where to read on; `root` is None where the command recorded nothing."""
    diagnosis = None
    try:
        if root is not None:
            _wait_for_last_words(root)
            evidence = gather(root)
            diagnosis = diagnose(evidence)
    except TargetError:  # no run directory has come about
        diagnosis = None
    if spawned:
        _say(
            f"not recorded: {count(spawned, 'process', 'processes')} that the program started and that trained without"
            " a process group; dtobs.attach(model, optimizer, run_dir=…) in each records it by itself"
        )
    if diagnosis is None or not (diagnosis.ranks or diagnosis.findings):
        disabled = os.environ.get("DTOBS_DISABLE") == "1"
        arrivals = {} if root is None else read_arrivals(root)  # ranks of several record from their process group on
        met = not arrivals
        why = "its ranks had no process group yet" if not met else "no process built a torch optimizer"
        if arrivals and all(arrival.state == "met" for arrival in arrivals.values()):
            why = "its ranks say above why"
        why = "no rank built a torch optimizer" if spawned else why
        failed = f"; the command ended with exit code {code}: its output may say why" if code else ""
        _say("nothing was recorded: " + ("DTOBS_DISABLE=1" if disabled else why) + failed)
        if code and met and Path(words[0]).name.startswith("python") and "RANK" not in os.environ:
            _say("a distributed script needs a launcher: dtobs run -- torchrun --nproc-per-node 2 train.py")
        return None
    spent = summarise(evidence.view)
    for line in spent.lines() if spent is not None and spent.settled else ():
        _say(line)
    if diagnosis.verdict is not None:
        meant = diagnosis.verdict.severity is Severity.NOTE
        how = f" (where it is meant: dtobs run --expect {diagnosis.verdict.expect})" if meant else ""
        _say(f"{diagnosis.verdict.code}: {diagnosis.verdict.summary}{how}")
    stood = [past for past in evidence.past if Trait.RECOVERABLE in past.finding.traits]
    for past in stood[-_MAX_PAST:]:
        _say(f"over since: {past.finding.code}, {duration_text(past.lost_seconds)}: {past.finding.summary}")
    if diagnosis.verdict is None and not stood:
        _say("nothing found")
    for note in diagnosis.notes:
        if note.startswith("interrupted after") or " exit code " in note or " after the others had finished" in note:
            _say(note)
    if diagnosis.verdict is not None or stood:
        _say(f"read more with: dtobs diagnose {root}")
    return diagnosis


def _wait_for_last_words(root: Path) -> None:
    """Give the monitor the moment it needs to write down how the ranks ended."""
    deadline = time.monotonic() + _LAST_WORDS_SECONDS
    while time.monotonic() < deadline:
        view = load_run(root)
        states = [view.process(rank) for rank in view.ranks]
        if all(s is None or s.alive or s.exit_code is not None for s in states):
            return
        time.sleep(0.1)


def _say(text: str) -> None:
    print(f"dtobs: {text}", file=sys.stderr, flush=True)
