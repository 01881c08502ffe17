"""What runs inside one rank: environment, process group, the test's function, its outcome, the exit.

The exit: a Gloo worker thread still drops the last collective's Work after the collective is complete, and needs the
GIL for it. If the interpreter is being finalised by then, Python 3.11 ends the thread inside a C++ destructor
("terminate called without an active exception", about one exit in ten); if the last owner of the process group is
destroyed by then, its destructor joins that thread with the GIL held, for ever. A rank therefore leaves the way every
multiprocessing child does, by `os._exit` after flushing, which finalises nothing, and the harness itself never
destroys the process group. A rank whose function returned keeps its sockets open until every other rank has
reported or ended, so that no rank sees "closed by peer" only because another was quicker.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import random
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# A real-time signal: the usual ones belong to the code under test.
STACKS_SIGNAL = signal.SIGRTMIN + 7


@dataclass(frozen=True)
class RankTask:
    """One rank's orders; pickled to the forked process."""

    rank: int
    world_size: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    environment: Mapping[str, str]
    folder: Path
    store: Path
    init_pg: bool
    timeout_seconds: float


@dataclass(frozen=True)
class Outcome:
    """How the function ended; exactly one of value and traceback means something (`error_type` is then set)."""

    value: Any = None
    error_type: str | None = None
    traceback: str | None = None


def main(task: RankTask, connection: Connection) -> None:
    """Body of the rank's process; exits 0 after a value, 1 after an exception."""
    os.environ.clear()
    os.environ.update(task.environment)
    _redirect_output(task.folder)
    stacks = (task.folder / "stacks.txt").open("w")
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    outcome = _run(task)
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send_bytes(_pickled(outcome))
    if outcome.error_type is not None:
        raise SystemExit(1)
    try:
        connection.recv_bytes()  # until the harness has heard of every rank
    except EOFError:  # the harness is gone
        return


def _redirect_output(folder: Path) -> None:
    for descriptor, name in ((1, "stdout.log"), (2, "stderr.log")):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    # pytest's capture was not inherited (the server was started by exec), but Python's objects may be block buffered.
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)


def _run(task: RankTask) -> Outcome:
    try:
        _prepare_torch(task)
        return Outcome(value=task.function(task.rank, task.world_size, *task.arguments))
    except BaseException as error:  # reported to the test, whatever it is, SystemExit included
        traceback.print_exc()
        return Outcome(error_type=type(error).__name__, traceback=traceback.format_exc())


def _prepare_torch(task: RankTask) -> None:
    import numpy
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # A fresh interpreter would have its own; forked ranks would share the server's.
    random.seed()
    numpy.random.seed(random.getrandbits(32))
    if not task.init_pg:
        return
    store = dist.FileStore(str(task.store), task.world_size)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=task.rank,
        world_size=task.world_size,
        timeout=timedelta(seconds=task.timeout_seconds),
    )
    # Nobody starts before all are connected: a quick rank that leaves would break a slow one's handshake.
    store.set(f"harness/joined/{task.rank}", "1")
    store.wait([f"harness/joined/{r}" for r in range(task.world_size)], timedelta(seconds=task.timeout_seconds))


def _pickled(outcome: Outcome) -> bytes:
    try:
        return pickle.dumps(outcome)
    except Exception as error:  # any class may fail to pickle in any way; the test is told which
        text = f"the value returned cannot be pickled: {error!r}"
        return pickle.dumps(Outcome(error_type=type(error).__name__, traceback=text))
