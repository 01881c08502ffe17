"""`run_ranks` and `start_ranks`: a fresh process per rank and call, a deadline, and nothing left behind."""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.harness import processes, server
from tests.harness.child import STACKS_SIGNAL, Outcome, RankTask, main
from tests.harness.evidence import describe_failures, describe_hang

# How long the others get to end by themselves once a rank failed that should not have.
_GRACE_SECONDS = 5.0


class RankFailure(AssertionError):
    """A rank raised, exited or was killed and the test did not expect it; the message has its traceback."""


class RankTimeout(AssertionError):
    """The deadline passed; the message has every living rank's Python stacks."""


@dataclass(frozen=True)
class RankResult:
    """What became of one rank. `signal` is set when a signal killed it, `exception` (a traceback) when it raised."""

    rank: int
    value: Any
    exitcode: int | None
    signal: int | None
    exception_type: str | None
    exception: str | None
    stdout: Path
    stderr: Path

    @property
    def ok(self) -> bool:
        return self.exitcode == 0 and self.exception is None


@dataclass
class _Rank:
    process: ForkServerProcess
    connection: Connection
    folder: Path
    outcome: Outcome | None = None
    listening: bool = True

    @property
    def finished(self) -> bool:
        return self.outcome is not None or not self.process.is_alive()

    @property
    def failed(self) -> bool:
        return self.outcome.error_type is not None if self.outcome else not self.process.is_alive()

    def receive(self) -> None:
        try:
            self.outcome = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.listening = False


@dataclass
class RankGroup:
    """Ranks at work. A context manager: what is alive when it is left is killed, with all it started."""

    world_size: int
    token: str
    folder: Path
    ranks: list[_Rank] = field(default_factory=list, repr=False)
    _released: bool = False

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process id of every rank, living or not."""
        return [_pid(r) for r in self.ranks]

    def kill(self, rank: int, sig: int = signal.SIGKILL) -> None:
        """Sends one rank a signal (SIGKILL, SIGSTOP, SIGCONT, ...)."""
        os.kill(self.pids[rank], sig)

    def wait(
        self, timeout: float, *, stop_on_failure: bool = False, unless: Mapping[int, object] | None = None
    ) -> bool:
        """Waits until every rank returned, raised or died; False when `timeout` seconds passed first.

        With `stop_on_failure` it also gives up a few seconds after a rank failed that is not in `unless`.
        """
        deadline = time.monotonic() + timeout
        shortened = False
        while not all(r.finished for r in self.ranks):
            if (
                stop_on_failure
                and not shortened
                and any(r.failed for n, r in enumerate(self.ranks) if n not in (unless or {}))
            ):
                deadline, shortened = min(deadline, time.monotonic() + _GRACE_SECONDS), True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._listen(left)
        self._drain()
        self._release()
        for rank in self.ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()) + _GRACE_SECONDS)
        return not any(r.process.is_alive() for r in self.ranks)

    def results(self) -> list[RankResult]:
        """One result a rank, as far as it is known now; `exitcode` is None for a rank still alive."""
        self._drain()
        return [_result(number, rank) for number, rank in enumerate(self.ranks)]

    def stacks(self, timeout: float = 2.0) -> str:
        """Python stacks and /proc state of every living rank, as text."""
        return describe_hang(
            [(n, _pid(r), r.folder) for n, r in enumerate(self.ranks) if not r.finished],
            STACKS_SIGNAL,
            timeout,
        )

    def close(self) -> None:
        """Kills the ranks and everything they started, by id; returns when they are gone."""
        for rank in self.ranks:
            if rank.process.is_alive():
                rank.process.kill()
        for rank in self.ranks:
            rank.process.join()
            rank.connection.close()
        processes.kill_token(self.token)

    def _listen(self, timeout: float) -> None:
        waiting = [r for r in self.ranks if not r.finished]
        objects = [r.connection for r in waiting if r.listening] + [r.process.sentinel for r in waiting]
        ready = wait(objects, timeout)
        for rank in waiting:
            if rank.connection in ready:
                rank.receive()

    def _drain(self) -> None:
        for rank in self.ranks:
            while rank.outcome is None and rank.listening and rank.connection.poll():
                rank.receive()

    def _release(self) -> None:
        if self._released:
            return
        self._released = True
        for rank in self.ranks:
            try:
                rank.connection.send_bytes(b"")
            except (BrokenPipeError, ConnectionResetError):  # it has ended already
                continue


def start_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    env: Mapping[str, str | None] | None = None,
    init_pg: bool = True,
    pg_timeout: float = 60.0,
) -> RankGroup:
    """Starts `function(rank, world_size, *arguments)` on every rank and returns at once.

    `function` is a module-level function; it and its arguments are pickled. Every rank has the variables of a
    torchrun worker (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, no MASTER_PORT), then `env` (None
    unsets), one thread, its output in files, and with `init_pg` a Gloo process group on loopback that met through a
    file, whose collectives time out after `pg_timeout` seconds. DTOBS_TEST_STORE is that file's path for functions
    that make the group themselves. Use it in a `with` statement.
    """
    token = uuid.uuid4().hex
    folder = Path(tempfile.mkdtemp(prefix=f"{function.__name__}-", dir=server.scratch()))
    ctx = server.context()
    group = RankGroup(world_size, token, folder)
    try:
        for rank in range(world_size):
            rank_folder = folder / f"rank{rank}"
            rank_folder.mkdir()
            task = RankTask(
                rank=rank,
                world_size=world_size,
                function=function,
                arguments=arguments,
                environment=_environment(rank, world_size, token, folder / "store", env or {}),
                folder=rank_folder,
                store=folder / "store",
                init_pg=init_pg,
                timeout_seconds=pg_timeout,
            )
            ours, theirs = ctx.Pipe()
            process = ctx.Process(target=main, args=(task, theirs), name=f"rank{rank}")
            process.start()
            theirs.close()
            group.ranks.append(_Rank(process, ours, rank_folder))
    except BaseException:
        group.close()
        raise
    return group


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    timeout: float = 60.0,
    env: Mapping[str, str | None] | None = None,
    init_pg: bool = True,
    expect_exit: Mapping[int, int | None] | None = None,
    pg_timeout: float | None = None,
) -> list[RankResult]:
    """Runs `function(rank, world_size, *arguments)` on every rank and waits for all: one result a rank, in order.

    `expect_exit` maps the ranks that are to end badly to their exit code (1 when they raise, −9 when SIGKILL ends
    them) or to None for any ending. Raises `RankFailure` for an ending not expected, `RankTimeout` (with every
    rank's stacks) when `timeout` seconds pass. See `start_ranks` for the rest.
    """
    expected = dict(expect_exit or {})
    with start_ranks(
        function, world_size, *arguments, env=env, init_pg=init_pg, pg_timeout=pg_timeout or timeout
    ) as group:
        ended = group.wait(timeout, stop_on_failure=True, unless=expected)
        stacks = "" if ended else group.stacks()
        results = group.results()
    wrong = [r for r in results if _unexpected(r, expected)]
    failed = [r for r in wrong if r.exitcode is not None or r.exception]
    if failed:
        raise RankFailure(describe_failures(failed, world_size, stacks))
    if not ended:
        raise RankTimeout(f"{function.__name__}: ranks did not end within {timeout} s\n{stacks}")
    if wrong:
        raise RankFailure(describe_failures(wrong, world_size, stacks))
    return results


def _unexpected(result: RankResult, expected: Mapping[int, int | None]) -> bool:
    if result.rank not in expected:
        return not result.ok
    return expected[result.rank] is not None and result.exitcode != expected[result.rank]


def _environment(
    rank: int, world_size: int, token: str, store: Path, changes: Mapping[str, str | None]
) -> dict[str, str]:
    values: dict[str, str | None] = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "DTOBS_TEST_STORE": str(store),
        processes.TOKEN_VARIABLE: token,
        **changes,
    }
    return {name: value for name, value in values.items() if value is not None}


def _result(number: int, rank: _Rank) -> RankResult:
    outcome = rank.outcome or Outcome()
    code = rank.process.exitcode
    return RankResult(
        rank=number,
        value=outcome.value,
        exitcode=code,
        signal=-code if code is not None and code < 0 else None,
        exception_type=outcome.error_type,
        exception=outcome.traceback,
        stdout=rank.folder / "stdout.log",
        stderr=rank.folder / "stderr.log",
    )


def _pid(rank: _Rank) -> int:
    assert rank.process.pid is not None
    return rank.process.pid
