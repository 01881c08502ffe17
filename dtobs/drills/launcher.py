"""Starts the ranks of a drill as torchrun's agent does, and ends them as it does."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from dtobs.drills import worker
from dtobs.drills.capabilities import Confinement

_GRACE_SECONDS = 2.0  # torchrun gives 30 before it kills
_POLL_SECONDS = 0.02
_TOLD: list[int] = []
"""The signals that reached this launcher."""


def main(
    fields: Mapping[str, Any], environments: Sequence[Mapping[str, str]], folder: Path, stays: Sequence[Connection]
) -> None:
    """Run a rank for each of `environments`; the process ids go to ``pid-<rank>`` and ``pid-launcher``.

    When one fails, the others are told to end; a signal to end goes on to all; who does not end is killed.
    """
    pids = {
        _fork(fields, environment, folder, stay): rank
        for rank, (environment, stay) in enumerate(zip(environments, stays, strict=True))
    }
    for heard in (signal.SIGINT, signal.SIGTERM):
        signal.signal(heard, lambda number, frame: _TOLD.append(number))
    for name, pid in (("launcher", os.getpid()), *((str(rank), pid) for pid, rank in pids.items())):
        part = folder / f"pid-{name}.part"
        part.write_text(str(pid))
        part.rename(folder / f"pid-{name}")
    left, failed = set(pids), False
    while left and not failed and not _TOLD:
        time.sleep(_POLL_SECONDS)
        failed = _reap(left)
    for number in (_TOLD[0] if _TOLD else int(signal.SIGTERM), int(signal.SIGKILL)):
        for pid in left:
            os.kill(pid, number)
        deadline = time.monotonic() + _GRACE_SECONDS
        while left and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            _reap(left)
    os._exit(int(failed or bool(_TOLD)))


def _reap(left: set[int]) -> bool:
    """Take the ranks that have ended from `left`; whether one of them failed."""
    failed = False
    for pid in list(left):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            left.remove(pid)
            failed |= os.waitstatus_to_exitcode(status) != 0
    return failed


def _fork(fields: Mapping[str, Any], environment: Mapping[str, str], folder: Path, stay: Connection) -> int:
    pid = os.fork()
    return pid if pid else _rank(fields, environment, folder, stay)


def _rank(fields: Mapping[str, Any], environment: Mapping[str, str], folder: Path, stay: Connection) -> NoReturn:
    """The life of one rank, which ends as a script of its own does."""
    code = 0
    try:
        worker.main("hangs", fields, environment, folder, stay, Confinement())
    except BaseException as error:  # noqa: BLE001 - as the interpreter does at the end of a script
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        code = 1
    os._exit(code)
