"""Where what a rank prints goes: always into its own log files; to the console from rank 0 only."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from runtime.errors import UsageError


class Tee(io.TextIOBase):
    """A text stream that writes to the console, where there is one, and to a log file.

    Printing never fails: a console that went away (a closed pipe) is dropped, and what a log does not take (a full
    disk) is missing in it. `not_logged` gets each such error.
    """

    def __init__(self, log: TextIO, console: TextIO | None, not_logged: Callable[[OSError], None]) -> None:
        self._log = log
        self._not_logged = not_logged
        self.console = console

    def write(self, text: str) -> int:
        if self.console is not None:
            try:
                self.console.write(text)
            except OSError:
                self.console = None
        try:
            self._log.write(text)
        except OSError as error:
            self._not_logged(error)
        return len(text)

    def flush(self) -> None:
        if self.console is not None:
            try:
                self.console.flush()
            except OSError:
                self.console = None
        try:
            self._log.flush()
        except OSError as error:
            self._not_logged(error)

    def fileno(self) -> int:
        """The console's descriptor, or the log's: what child processes and faulthandler write to."""
        return (self.console or self._log).fileno()

    def isatty(self) -> bool:
        return self.console is not None and self.console.isatty()

    def close(self) -> None:
        """Close the log; the console stays open."""
        if not self.closed:
            super().close()  # flushes
            with suppress(OSError):  # said at the flush
                self._log.close()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._log.encoding


class RankOutput:
    """Puts sys.stdout and sys.stderr of this process into `folder`/stdout.log and stderr.log; `close` undoes it.

    With `console` the same text also goes where it went before. Logs are line-buffered, appended to over attempts.
    Where they cannot be written to, the console is told once. Raises UsageError where they cannot be opened.
    """

    def __init__(self, folder: Path, *, console: bool) -> None:
        self._before = sys.stdout, sys.stderr
        self._folder = folder
        self._told = False
        self._tees = [Tee(_open_log(folder / name), None, self._not_logged) for name in ("stdout.log", "stderr.log")]
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

    def _not_logged(self, error: OSError) -> None:
        """Say on the console, once, that the logs have gaps from now on."""
        errors = self._tees[1]
        if errors.console is not None and not self._told:
            self._told = True  # first: saying it is also written to the log
            errors.write(
                f"warning: cannot write the logs in {self._folder}: {error.strerror}; what is printed until there is"
                " room will be missing in them\n"
            )

    def close(self) -> None:
        """Restore the streams and close the logs. Calling it again does nothing."""
        if self._tees:
            sys.stdout, sys.stderr = self._before
            for tee in self._tees:
                tee.close()
            self._tees = []


def _open_log(path: Path) -> TextIO:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"cannot write the log {path}: {error.strerror}") from error
    return open(descriptor, "w", encoding="utf-8", buffering=1)
