"""Where what a rank prints goes: always into its own log files; to the console from rank 0 only."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import TextIO


class Tee(io.TextIOBase):
    """A text stream that writes to a log file and, where there is one, to the console.

    A console that went away (a closed pipe) is dropped; the log goes on.
    """

    def __init__(self, log: TextIO, console: TextIO | None) -> None:
        self._log = log
        self.console = console

    def write(self, text: str) -> int:
        self._log.write(text)
        if self.console is not None:
            try:
                self.console.write(text)
            except OSError:
                self.console = None
        return len(text)

    def flush(self) -> None:
        self._log.flush()
        if self.console is not None:
            try:
                self.console.flush()
            except OSError:
                self.console = None

    def fileno(self) -> int:
        """The console's descriptor, or the log's: what child processes and faulthandler write to."""
        return (self.console or self._log).fileno()

    def isatty(self) -> bool:
        return self.console is not None and self.console.isatty()

    def close(self) -> None:
        """Close the log; the console stays open."""
        if not self.closed:
            super().close()  # flushes
            self._log.close()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._log.encoding


class RankOutput:
    """Puts sys.stdout and sys.stderr of this process into `folder`/stdout.log and stderr.log; `close` undoes it.

    With `console` the same text also goes where it went before. Logs are line-buffered, appended to over attempts.
    """

    def __init__(self, folder: Path, *, console: bool) -> None:
        self._before = sys.stdout, sys.stderr
        self._tees = [Tee(_open_log(folder / name), None) for name in ("stdout.log", "stderr.log")]
        sys.stdout, sys.stderr = self._tees  # type: ignore[assignment]
        if console:
            self.show()

    def show(self) -> None:
        """From now on the console gets the text too: the terminal came back, or there is a failure to show."""
        for tee, before in zip(self._tees, self._before, strict=False):
            tee.console = before

    def hide(self) -> None:
        """From now on only the logs get the text."""
        for tee in self._tees:
            tee.console = None

    def close(self) -> None:
        """Restore the streams and close the logs. Calling it again does nothing."""
        if self._tees:
            sys.stdout, sys.stderr = self._before
            for tee in self._tees:
                tee.close()
            self._tees = []


def _open_log(path: Path) -> TextIO:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    return open(descriptor, "w", encoding="utf-8", buffering=1)
