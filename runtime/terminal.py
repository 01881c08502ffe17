"""`--tui`: gives the terminal to `dtobs top` while training, and takes it back.

torchrun starts its workers in sessions of their own, so /dev/tty is out of reach, but descriptors 0, 1 and 2 are still
the terminal. Every rank sends its own 1 and 2 (C++ output included) to its log files; local rank 0 keeps copies of
the originals, gives them to the child, and puts them back when the child ends, by `q` or with the training.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from runtime.phases import Listener

_STOP_SECONDS = 5.0


class Terminal(Listener):
    """The terminal of this process while a child may own it. A listener of phases: each step asks for the child."""

    def __init__(self, folder: Path, command: list[str] | None, returned: Callable[[], None]) -> None:
        """Send descriptors 1 and 2 to logs in `folder`; with `command` start it on the original ones.

        `returned` is called once, when the terminal is this process' again.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        self._returned = returned
        self._originals = [os.dup(descriptor) for descriptor in (0, 1, 2)]
        for descriptor, name in ((1, "stdout.log"), (2, "stderr.log")):
            log = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, descriptor)
            os.close(log)
        self._child: subprocess.Popen[bytes] | None = None
        if command is not None:
            stdin, stdout, stderr = self._originals
            self._child = subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr)

    @staticmethod
    def usable() -> bool:
        """True where descriptors 0 and 1 are a terminal."""
        return os.isatty(0) and os.isatty(1)

    def step(self, step: int) -> None:
        """Take the terminal back if the child has ended."""
        if self._child is not None and self._child.poll() is not None:
            self._take_back()

    def close(self) -> None:
        """End the child if it still runs and take the terminal back. Calling it again does nothing."""
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()
            try:
                self._child.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
        self._take_back()

    def _take_back(self) -> None:
        originals, self._originals = self._originals, []
        if not originals:
            return
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, original in zip((0, 1, 2), originals, strict=True):
            os.dup2(original, descriptor)
            os.close(original)
        self._returned()


def viewer(run_dir: Path) -> list[str]:
    """The command that shows `run_dir`."""
    return [sys.executable, "-m", "dtobs", "top", str(run_dir)]
