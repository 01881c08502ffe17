"""A command run observed for a few steps and then ended: what `dtobs prove` and `dtobs replay` compare."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dtobs.errors import DtobsError, TargetError, UsageError
from dtobs.host.activity import family_of
from dtobs.host.process import read_process, start_ticks
from dtobs.integrations.launch import environment
from dtobs.recording.view import RunView, load_run

_LOOK_SECONDS = 0.25
_GRACE_SECONDS = 10.0


def observe(words: Sequence[str], run_dir: Path, timeout: float, *, steps: int = 0, until: int = 0) -> RunView:
    """Run a command until every rank has finished `steps` steps, or step number `until`; what was recorded.

    Raises DtobsError when no rank has finished a step by `timeout` seconds or the command's end.
    """
    shown = textwrap.shorten(shlex.join(words), 160, placeholder=" …")
    print(f"dtobs: running {shown}", file=sys.stderr, flush=True)
    run_dir.mkdir(parents=True, exist_ok=True)
    # What a step left is read before the next one changes it: the one after it is still observed.
    field, number = ("step", until + 1) if until else ("steps_done", steps)
    values = environment(os.environ, run_dir, "run", None) | {
        "DTOBS_PROBES": "ledger=all,samples=all",
        "DTOBS_MONITOR": "0",
        "DTOBS_SLOW_AFTER": f"{field}={number}",
    }
    log = run_dir / "output.log"
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(words, stdout=output, stderr=output, env=values, start_new_session=True)
        except OSError as error:
            raise UsageError(f"cannot run {words[0]!r}: {error.strerror}") from error
        try:
            _wait(process, run_dir, timeout, field, number)
        finally:
            _end(process)
    try:
        view = load_run(run_dir, with_capture=False)
    except TargetError:  # nothing was recorded at all
        view = None
    if view is None or not len(view.pages) or not view.pages["steps_done"].min():
        tail = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        raise DtobsError(f"{shlex.join(words)} finished no step: {tail[0] if tail else 'it printed nothing'}")
    return view


def _wait(process: subprocess.Popen[bytes], run_dir: Path, timeout: float, field: str, number: int) -> None:
    """Until `field` of all ranks' pages is past `number`, the command has ended, or the time is over."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and process.poll() is None:
        try:
            view = load_run(run_dir, with_capture=False)
        except TargetError:
            view = None
        if view is not None and len(view.pages) and not view.missing_ranks and view.pages[field].min() > number:
            return
        time.sleep(_LOOK_SECONDS)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the command and what it started: torchrun gives each rank a session of its own."""
    ours = {pid: start_ticks(pid) for pid in family_of(process.pid)}
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_SECONDS)
    for pid, began in ours.items():
        if began and read_process(pid, began).alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.wait()
