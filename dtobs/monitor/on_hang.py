"""Acts on a hang as the run asked: reports it, ends the ranks so that a launcher restarts them, or runs a command.

Nothing is done on a suspicion. There has to be a stall, its capture has to be on disk, and two passes of the detectors
in a row have to name a cause that is critical and certain or likely. Nothing is done twice about one hang, also by a
monitor that takes over: what was done is in ``on-hang.jsonl``. A rank that a debugger holds is never ended.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dtobs.codec import DecodeError, decode, parse
from dtobs.detectors.hangs.stall import Stall
from dtobs.findings import CATALOGUE, Confidence, Finding, Severity
from dtobs.host.process import ProcessState, read_process
from dtobs.monitor.exits import Watched, append_lines
from dtobs.recording.capture import Capture
from dtobs.recording.policy import Policy
from dtobs.recording.rundir import RunDirectory
from dtobs.words import duration_text

COMMAND_SECONDS = 60.0
"""A command that takes longer is ended, with all it started."""
GRACE_SECONDS = 5.0
"""Between SIGABRT, which leaves a core and stacks where the rank is set up for it, and SIGKILL."""
_PASSES = 2

log = logging.getLogger("dtobs.monitor")


@dataclass(frozen=True)
class Hang:
    """The stall that is to be acted on, and the ranks of this node with what is known of their processes."""

    attempt: int
    stall: Stall
    capture: Path  #: the folder it was saved to
    ranks: Sequence[tuple[Watched, ProcessState]]

    @property
    def key(self) -> str:
        """The same for every look at one hang."""
        return f"{self.attempt}/{self.stall.since_ns}"


class OnHang:
    """Decides and acts, once a hang. Acting happens in a thread: the monitor goes on watching."""

    def __init__(self, policy: Policy, run: RunDirectory, node: int, failed: Callable[[str], None]) -> None:
        self.policy, self._run, self._node, self._failed = policy, run, node, failed
        self._journal = run.node(node) / "on-hang.jsonl"
        self._done = _done_before(self._journal)
        self._candidate, self._passes = "", 0
        self._thread: threading.Thread | None = None

    def consider(self, found: Sequence[Finding], hang: Hang | None) -> bool:
        """Look at one pass of the detectors; whether something was begun."""
        cause = worst(found)
        if self.policy.action == "report" or hang is None or cause is None or hang.key in self._done:
            self._passes = 0
            return False
        if not (hang.capture / "capture.json").exists():
            return False  # without the evidence on disk, nothing is destroyed
        if self._candidate != hang.key:
            self._candidate, self._passes = hang.key, 0
        self._passes += 1
        if self._passes < _PASSES:
            return False
        if self.policy.action == "abort" and any(state.state == "t" for _, state in hang.ranks):
            return False  # somebody is looking at it with a debugger
        self._done.add(hang.key)
        act = self._abort if self.policy.action == "abort" else self._command
        self._thread = threading.Thread(target=self._guarded, args=(act, hang, cause), name="on-hang", daemon=True)
        self._thread.start()
        return True

    def finish(self) -> None:
        """Wait for what was begun."""
        if self._thread is not None:
            self._thread.join(COMMAND_SECONDS + GRACE_SECONDS)

    def _guarded(self, act: Callable[[Hang, Finding], str], hang: Hang, cause: Finding) -> None:
        log.info("on hang: %s because of %s: %s", self.policy.action, cause.code, cause.summary)
        try:
            outcome = act(hang, cause)
        except OSError as error:
            outcome = f"failed: {error}"
            self._failed(f"on hang, {self.policy.action}: {error}")
        log.info("on hang: %s", outcome)
        line = {
            "utc": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "hang": hang.key,
            "action": self.policy.action,
            "command": list(self.policy.command),
            "outcome": outcome,
            "finding": cause.to_json(),
        }
        if not append_lines(self._journal, [json.dumps(line) + "\n"]):
            self._failed(f"{self._journal} cannot be written")

    def _abort(self, hang: Hang, cause: Finding) -> str:
        """End the ranks of this node, each only while it is the process that recorded."""
        pidfds = [(watched, fd) for watched, _ in hang.ranks if (fd := _open(watched)) is not None]
        try:
            for _, fd in pidfds:
                # A suspended process acts on SIGABRT once it is continued. It ends there and then.
                _send(fd, signal.SIGABRT)
                _send(fd, signal.SIGCONT)
            deadline = time.monotonic() + GRACE_SECONDS
            while (left := [w for w, _ in pidfds if _alive(w)]) and time.monotonic() < deadline:
                time.sleep(0.05)
            for watched, fd in pidfds:
                if watched in left:
                    _send(fd, signal.SIGKILL)
        finally:
            for _, fd in pidfds:
                os.close(fd)
        ended = ", ".join(f"rank {w.rank} (process {w.pid})" for w, _ in pidfds)
        hard = f"; by SIGKILL: {', '.join(f'rank {w.rank}' for w in left)}" if left else ""
        return f"ended {ended or 'nobody'}{hard}"

    def _command(self, hang: Hang, cause: Finding) -> str:
        """Run the user's command: the finding as JSON on its standard input, its output in ``on-hang.log``."""
        path = self._run.node(self._node) / "on-hang.log"
        values = {
            **os.environ,
            "DTOBS_RUN_DIR": str(self._run.root),
            "DTOBS_CAPTURE": str(hang.capture),
            "DTOBS_FINDING_CODE": cause.code,
            "DTOBS_FINDING_RANKS": ",".join(str(rank) for rank in cause.ranks),
            "DTOBS_FINDING_SUMMARY": cause.summary,
            "DTOBS_DISABLE": "1",  # a Python program that the command starts is no rank of this run
        }
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "wb") as output:
            process = subprocess.Popen(
                self.policy.command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._run.root,
                env=values,
                start_new_session=True,  # so that all it starts can be ended with it
            )
            try:
                process.communicate(json.dumps(cause.to_json()).encode(), COMMAND_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # our child, not waited for yet: the number is still its own
                process.wait()
                return f"the command was ended after {duration_text(COMMAND_SECONDS)}; its output is in {path}"
        return f"the command exited with code {process.returncode}; its output is in {path}"


def worst(found: Sequence[Finding]) -> Finding | None:
    """The hang to act on: critical, and at least likely; the surest first."""
    fit = [
        one
        for one in found
        if CATALOGUE[one.code].family == "hangs"
        and one.severity is Severity.CRITICAL
        and one.confidence is not Confidence.POSSIBLE
    ]
    return max(fit, key=lambda one: one.confidence.order, default=None)


def hang_of(
    stall: Stall | None,
    capture: Capture | None,
    captures: Path,
    attempt: int,
    ranks: Sequence[tuple[Watched, ProcessState]],
) -> Hang | None:
    """What the monitor knows, put together; None while nothing hangs or nothing is captured."""
    if stall is None or capture is None:
        return None
    return Hang(attempt, stall, captures / capture.taken_utc, [(w, s) for w, s in ranks if s.alive])


def _open(watched: Watched) -> int | None:
    """A handle of the rank's process, None when it is gone; a later process with its number is never meant."""
    try:
        fd = os.pidfd_open(watched.pid)
    except OSError:
        return None
    if not _alive(watched):  # asked after opening: the handle is of the process that is asked about
        os.close(fd)
        return None
    return fd


def _alive(watched: Watched) -> bool:
    return read_process(watched.pid, watched.start_ticks).alive


def _send(fd: int, number: signal.Signals) -> None:
    try:
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        pass  # it has ended by itself


def _done_before(path: Path) -> set[str]:
    """Hangs that an earlier monitor of this node acted on."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    found: set[str] = set()
    for line in lines:
        try:
            found.add(str(decode(dict[str, Any], parse(line)).get("hang")))
        except DecodeError:
            continue  # the last line may be cut
    return found
