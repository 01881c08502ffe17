"""Errors a user can meet, as one family.

::

    DtobsError                    exit code 1; the message says what, where and what to do
    ├── UsageError                exit code 2; a flag or an argument that cannot be right
    ├── TargetError               the thing to look at is not there, or is not what it should be
    ├── RecordingError            a recording is torn at its head, of an unknown version, or hostile
    ├── DumpError                 a Flight Recorder dump is damaged, hostile or something else
    ├── RecordingDisabled         a recording cannot be started (full disk, read-only folder)
    ├── DependencyMissing         an optional package is needed for this command
    └── ServiceError              a monitor, a Prometheus or a Grafana did not answer as it should

``dtobs.cli`` turns them into exit codes in one place. None of them is ever raised into a training loop.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PLACE_SHOWN = 200
_ADVICE = {
    errno.EACCES: "Run this as its owner, or ask them to let you read it",
    errno.EPERM: "Run this as its owner, or ask them to let you read it",
    errno.ENOSPC: "Make room there and try again",
    errno.ENAMETOOLONG: "Give a path that can exist",
}


class DtobsError(Exception):
    """Base of every error that dtobs raises on purpose."""

    exit_code = 1


class UsageError(DtobsError):
    """A flag or an argument that cannot be right."""

    exit_code = 2


class TargetError(DtobsError):
    """The run directory, capture, dump folder or address to look at is missing or is something else."""


class RecordingError(DtobsError):
    """A recording file cannot be read: not one of ours, a newer version, or damaged at its head."""


class DumpError(DtobsError):
    """A Flight Recorder dump cannot be used: cut off, hostile, or something else."""


class RecordingDisabled(DtobsError):
    """A recording cannot be started here; training goes on without it."""


class DependencyMissing(DtobsError):
    """An optional package is needed; the message names the extra that brings it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"this needs the package {package!r}: pip install 'dtobs[{extra}]'")


class ServiceError(DtobsError):
    """A server that we talk to did not answer as it should."""


def refusal(error: OSError, place: object) -> str:
    """What the system refused at `place` and what to do, on one line."""
    where = str(place)
    where = f"{where[:_PLACE_SHOWN]}…" if len(where) > _PLACE_SHOWN else where
    advice = _ADVICE.get(error.errno or 0, "Check it and try again")
    return f"{where}: {error.strerror or brief(error)}. {advice}"


@contextmanager
def opening(target: object) -> Iterator[None]:
    """What the system refuses while `target` is looked at becomes a TargetError that says what to do."""
    try:
        yield
    except OSError as error:
        raise TargetError(refusal(error, target)) from error


def exists(path: Path) -> bool:
    """Whether there is something at `path`. Raises OSError where the system does not let us know, on every Python.

    `Path.exists` says no instead from Python 3.14 on.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def brief(error: BaseException) -> str:
    """The type and the words of `error` on one line of at most 200 characters: they may quote what a stranger sent."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[:200]
