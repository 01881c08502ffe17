"""A training command as ``dtobs run`` starts it: the environment that makes its ranks attach, signals, the terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import IO

from dtobs.errors import UsageError
from dtobs.host.process import with_path

STARTUP = Path(__file__).resolve().parent / "startup"
"""The folder whose ``sitecustomize`` Python runs first."""
UNSEEN = "DTOBS_UNSEEN"
"""Names the file in which processes that train and are no ranks say so, a line each."""
_FORWARDED = (signal.SIGTERM, signal.SIGHUP)


def environment(inherited: Mapping[str, str], run_dir: Path, name: str, hang_timeout: float | None) -> dict[str, str]:
    """The variables for a command whose ranks are to record to `run_dir`."""
    values = with_path(inherited, STARTUP) | {
        "DTOBS_AUTO_ATTACH": "1",
        "DTOBS_RUN_DIR": str(run_dir),
        "DTOBS_RUN_NAME": name,
    }
    if hang_timeout is not None:
        values["DTOBS_HANG_TIMEOUT"] = str(hang_timeout)
    return values


class Command:
    """A command to run, once."""

    def __init__(self, words: Sequence[str], values: Mapping[str, str]) -> None:
        self._words, self._values = list(words), dict(values)

    def run(self, stdout: int | None = None) -> int:
        """Run it on our own standard streams, or its output into `stdout`; returns its exit code.

        Raises UsageError when it cannot be started.
        """
        process = self._start(None, stdout, None)
        with _passing_signals(process):
            return _code(process.wait())

    def with_screen(self, viewer: Sequence[str], log: Path) -> int:
        """Run it with its output in `log`, and `viewer` on the terminal until either ends; returns its exit code.

        Raises UsageError when it cannot be started, OSError when `log` cannot be made.
        """
        with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as output:
            process = self._start(subprocess.DEVNULL, output, output)
        with _passing_signals(process):
            screen = subprocess.Popen(viewer)
            Thread(target=_end_with, args=(process, screen), daemon=True).start()
            screen.wait()
            if process.poll() is None:
                sys.stderr.write(f"dtobs: the command goes on; its output is in {log}; Ctrl-C ends it\n")
            return _code(process.wait())

    def _start(
        self, stdin: int | None, stdout: int | IO[bytes] | None, stderr: IO[bytes] | None
    ) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(self._words, stdin=stdin, stdout=stdout, stderr=stderr, env=self._values)
        except OSError as error:
            raise UsageError(f"cannot run {self._words[0]!r}: {error.strerror}") from error


@contextmanager
def _passing_signals(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass on what is sent to us alone. Ctrl-C reaches the terminal's whole group, so the command has it already."""

    def forward(number: int, _frame: FrameType | None) -> None:
        process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_with(process: subprocess.Popen[bytes], viewer: subprocess.Popen[bytes]) -> None:
    process.wait()
    viewer.terminate()


def _code(returned: int) -> int:
    """As a shell says it."""
    return returned if returned >= 0 else 128 - returned
