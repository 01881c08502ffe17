"""Gather the evidence of all ranks of this host at once: process, Python lock, stacks, Flight Recorder."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from dtobs.events import RankState
from dtobs.host import rank_stacks
from dtobs.host.blocked import waits_for
from dtobs.host.kernel_log import XID_NOTE, read_xids
from dtobs.host.loader_workers import awaited_worker
from dtobs.host.process import ProcessState, read_process
from dtobs.host.stacks import main_thread, parse_stacks
from dtobs.monitor import worker_server
from dtobs.recording.capture import Capture, Gil, RankCapture
from dtobs.recording.rundir import RunDirectory
from dtobs.recording.view import RunView, ran_here

DEADLINE_SECONDS = 5.0
"""The whole capture is bounded by this, whatever the ranks do."""
GIL_SECONDS = 1.5
STACK_SECONDS = 2.0
FLIGHT_RECORDER_SECONDS = 3.0
_LEFT_SECONDS = 1.0
"""Of that, for workers that do not answer: the stacks of their rank, which are there, must not come too late."""
_MAX_THREADS = 64
_TICKS = os.sysconf("SC_CLK_TCK")
_FRESH_NS = 60_000_000_000


@dataclass(frozen=True)
class _Target:
    """What is needed to look at one rank, read before any thread starts."""

    rank: int
    pid: int
    ticks: int
    closed: bool
    socket: str
    signal: int  #: for the stacks of all threads, while its Python lock is held
    main_signal: int  #: for that of the main one, else
    stacks: Path
    known: ProcessState | None
    held_before: bool


@dataclass(frozen=True)
class _Python:
    """What is known of a rank's interpreter."""

    gil: Gil
    stacks: str
    notes: tuple[str, ...] = ()
    waits_for: str = ""  #: the worker process that it waits for


def capture_ranks(
    view: RunView,
    reason: str,
    *,
    previous: Capture | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> Capture:
    """Look at every rank that ran on this host, all in parallel, within `deadline_seconds`.

    A rank that did not answer is in the result with notes that say so. A rank whose Python lock was held in the
    `previous` capture (by default the view's own), less than a minute ago, and which has not moved since is not asked
    again: each question that stays open costs it a thread.
    """
    taken_ns, taken_utc = time.monotonic_ns(), utc_stamp()
    previous = previous or view.capture
    if previous is not None and taken_ns - previous.taken_ns > _FRESH_NS:
        previous = None
    targets = _targets(view, previous)
    if not targets:
        return Capture(taken_ns, taken_utc, reason)
    deadline = time.monotonic() + deadline_seconds
    looks: dict[int, dict[str, Future[Any]]] = {}
    pool = ThreadPoolExecutor(min(_MAX_THREADS, 2 * len(targets)), thread_name_prefix="capture")
    states = {t.rank: _process(t) for t in targets}
    ranks_by_pid = {t.pid: t.rank for t in targets}
    # Before anybody is asked: a signal ends what some calls wait for.
    waits = {t.rank: waits_for(t.pid, ranks_by_pid) if states[t.rank].alive else "" for t in targets}
    try:
        for target in targets:
            looks[target.rank] = _start(pool, target, states[target.rank], deadline)
        wait_for([f for asked in looks.values() for f in asked.values()], deadline - time.monotonic())
        ranks = {t.rank: _collect(t, states[t.rank], looks[t.rank], waits[t.rank]) for t in targets}
        ranks = _with_device_errors(ranks, targets)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return Capture(taken_ns, taken_utc, reason, ranks)


def _with_device_errors(ranks: dict[int, RankCapture], targets: list[_Target]) -> dict[int, RankCapture]:
    """Add what the kernel logged of the devices that the ranks' processes use, where its log may be read."""
    began = {t.rank: t.ticks / _TICKS for t in targets}
    errors = read_xids()
    return {
        rank: replace(seen, notes=(*seen.notes, *(f"{XID_NOTE}{xid}" for xid in mine)))
        for rank, seen in ranks.items()
        for mine in [[x for x in errors if x.pid == seen.process.pid and x.seconds >= began[rank]]]
    }


def utc_stamp() -> str:
    """The present time as captures are named after it: sortable, to the millisecond."""
    now = datetime.now(UTC)
    return now.strftime("%Y%m%dT%H%M%S.") + f"{now.microsecond // 1000:03d}Z"


def make_room(folder: Path, count: int) -> None:
    """Remove old captures so that with the next there are `count`; never the first: it shows how trouble began."""
    try:
        names = sorted(p.name for p in folder.iterdir() if p.is_dir())
    except OSError:
        return
    for name in names[1 : 1 + max(0, len(names) - count + 1)]:
        shutil.rmtree(folder / name, ignore_errors=True)


def _targets(view: RunView, previous: Capture | None) -> list[_Target]:
    run = RunDirectory(view.root)
    found: list[_Target] = []
    for row, rank in zip(view.pages, view.ranks, strict=True):
        said = view.meta(rank).process
        if not ran_here(said):
            continue
        before = previous.ranks.get(rank) if previous else None
        still = previous is not None and int(row["heartbeat_ns"]) < previous.taken_ns
        found.append(
            _Target(
                rank=rank,
                pid=int(row["pid"]),
                ticks=int(row["start_ticks"]),
                closed=int(row["state"]) == RankState.CLOSED,
                socket=str(said.get("worker_server") or ""),
                signal=int(said.get("stacks_signal") or 0),
                main_signal=int(said.get("main_signal") or said.get("stacks_signal") or 0),
                stacks=_stacks_file(run, said, rank, row),
                known=view.processes.get(rank),
                held_before=before is not None and before.gil == "held" and still,
            )
        )
    return found


def _stacks_file(run: RunDirectory, said: dict[str, Any], rank: int, row: np.void) -> Path:
    named = said.get("stacks_file")
    return Path(str(named)) if named else run.stacks(rank, int(row["attempt"]))


def _process(target: _Target) -> ProcessState:
    state = read_process(target.pid, target.ticks)
    if not state.alive and target.known is not None and target.known.exit_code is not None:
        return target.known  # how it ended was seen when it did
    return state


def _start(pool: ThreadPoolExecutor, target: _Target, state: ProcessState, deadline: float) -> dict[str, Future[Any]]:
    asked: dict[str, Future[Any]] = {}
    if not state.alive or target.pid == os.getpid():
        return asked
    if state.stopped:
        asked["python"] = pool.submit(_stopped, target, deadline)
    elif not target.closed:
        asked["python"] = pool.submit(_python, target, deadline)
        if target.socket:
            asked["fr"] = pool.submit(worker_server.flight_recorder, target.socket, FLIGHT_RECORDER_SECONDS)
    return asked


def _python(target: _Target, deadline: float) -> _Python:
    """The lock first, then the stacks.

    A rank that has its lock free prints its stacks itself. Only the others get the signal, which would end a native
    ``sleep`` or ``poll`` early and so change what is to be seen.
    """
    lock = worker_server.PythonLock("unknown")
    if target.held_before:
        lock = worker_server.PythonLock("held", "has not moved since Python did not answer in the last capture")
    elif target.socket:
        lock = worker_server.python_lock(target.socket, GIL_SECONDS)
    notes = (lock.why,) if lock.why else ()
    stacks = lock.stacks
    if not _has_frames(stacks):
        try:
            stacks = _stacks(target, target.signal if lock.state == "held" else target.main_signal, deadline)
        except rank_stacks.NoStacks as error:
            return _Python(lock.state, "", (*notes, str(error)))
    main = main_thread(parse_stacks(stacks))
    worker = awaited_worker(main, target.pid, target.main_signal, target.stacks, deadline - _LEFT_SECONDS)
    return _Python(lock.state, stacks, notes, worker)


def _stopped(target: _Target, deadline: float) -> _Python:
    """A process that is suspended answers nothing; it can only be read from outside."""
    try:
        return _Python("unknown", rank_stacks.by_pyspy(target.pid, deadline - time.monotonic()))
    except rank_stacks.NoStacks as error:
        return _Python("unknown", "", (str(error),))


def _has_frames(text: str) -> bool:
    return bool(parse_stacks(text))


def _collect(target: _Target, state: ProcessState, asked: dict[str, Future[Any]], waits: str) -> RankCapture:
    seen = RankCapture(target.rank, state, waits_for=waits)
    notes: list[str] = []
    for name, future in asked.items():
        if not future.done():
            notes.append(f"{name}: not finished in time")
            continue
        try:
            value = future.result()
        except worker_server.HandlerError as error:
            notes.append(str(error))
            continue
        if name == "fr":
            seen = replace(seen, flight_recorder=value)
        else:
            seen = replace(seen, gil=value.gil, stacks_text=value.stacks, waits_for=value.waits_for or waits)
            notes += value.notes
    if not state.alive:
        notes.append(state.ending)
    return replace(seen, notes=tuple(notes))


def _stacks(target: _Target, signal: int, deadline: float) -> str:
    """By `signal`; by py-spy where the rank does not answer one, in what time is left. Raises NoStacks."""
    try:
        seconds = min(STACK_SECONDS, deadline - time.monotonic())
        return rank_stacks.by_signal(target.pid, target.ticks, signal, target.stacks, seconds)
    except rank_stacks.NoStacks as first:
        try:
            return rank_stacks.by_pyspy(target.pid, deadline - time.monotonic())
        except rank_stacks.NoStacks as second:
            raise rank_stacks.NoStacks(f"{first}; {second}") from second
