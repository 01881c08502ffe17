"""Performs a drill on this machine: a small real job with a fault in it, watched as any job is, and then diagnosed."""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.forkserver
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from dtobs.diagnose import Diagnosis, diagnose, gather
from dtobs.diagnose.gather import TakeCapture
from dtobs.drills import worker
from dtobs.drills.capabilities import Confinement, confined, why_unavailable
from dtobs.drills.faults import WORLD, Drill
from dtobs.errors import DtobsError
from dtobs.findings import CATALOGUE
from dtobs.host.process import read_process
from dtobs.recording.journal import read_journal
from dtobs.recording.rundir import RunDirectory, read_json

_POLL_SECONDS = 0.1
_GOODBYE_SECONDS = 1.0
_SETTLE_SECONDS = 1.0  # for the second thing that a fault shows, once the first was found
_SECOND_THOUGHTS_SECONDS = 10.0  # for the right finding, once there is another one
_MONITOR_SECONDS = 15.0
_IMPORTED_LATE = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "torch._dynamo",
)


@dataclass(frozen=True)
class Outcome:
    """What became of a drill. `seconds` from the strike to the finding; None where nobody saw the moment.

    There is no diagnosis where this machine does not permit the drill, which `skipped` explains, and where its job
    left nothing that could be read, which `broken` explains.
    """

    drill: Drill
    diagnosis: Diagnosis | None
    seconds: float | None
    skipped: str = ""
    broken: str = ""

    @property
    def found(self) -> str | None:
        """The expected code where it was found, else that of the verdict; None without a finding.

        What neither hangs nor raises may be true under two codes: a rank that is starved of data is slow as well.
        """
        codes = self._codes()
        if self.drill.family in ("silent", "time") and self.drill.expected in codes:
            return self.drill.expected
        return codes[0] if codes else None

    @property
    def passed(self) -> bool:
        """Whether the expected was found at the right ranks and nothing else was accused of stopping the run.

        Of a healthy drill, that there is no finding at all; what this machine does not permit has not failed.
        """
        if self.diagnosis is None:
            return bool(self.skipped)
        if self.found != self.drill.expected:
            return False
        verdict = self.diagnosis.verdict
        if verdict is None or self.drill.ranks is None:
            return True
        stops = {code for code in self._codes() if CATALOGUE[code].family == "hangs"}
        return verdict.ranks == self.drill.ranks and stops == {self.drill.expected}

    def _codes(self) -> list[str]:
        return [finding.code for finding in self.diagnosis.findings] if self.diagnosis is not None else []


def perform_all(
    drills: Sequence[Drill],
    folder: Path,
    take_capture: TakeCapture,
    *,
    at_once: int = 1,
    told: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Perform the drills below `folder`, `at_once` at a time; `told` hears of each outcome in order, as it is known."""
    refusals = {need: why_unavailable(need) for need in {drill.needs for drill in drills}}

    def one(drill: Drill) -> Outcome:
        if refusals[drill.needs]:
            return Outcome(drill, None, None, refusals[drill.needs])
        try:
            return perform(drill, folder / f"{drill.family}-{drill.name}-{drill.wrapper}", take_capture)
        except (DtobsError, OSError) as error:  # its ranks may have died before they recorded anything
            return Outcome(drill, None, None, broken=str(error))

    outcomes = []
    context()  # only the main thread may start it
    with ThreadPoolExecutor(at_once, thread_name_prefix="drill") as pool:
        for outcome in pool.map(one, drills):
            told(outcome)
            outcomes.append(outcome)
    return outcomes


def perform(drill: Drill, folder: Path, take_capture: TakeCapture, *, deadline_seconds: float = 180.0) -> Outcome:
    """Run the drill on its ranks below `folder` (which it creates) and diagnose it; nothing is left running."""
    folder.mkdir(parents=True)
    run_dir, mark = folder / "run", folder / "struck"
    with confined(drill.needs, drill.wrapper, drill.world) as confinements:
        ranks = _start(drill, folder, run_dir, mark, confinements)
        try:
            found_at = _until_found(drill, run_dir, folder, ranks, deadline_seconds)
            diagnosis = diagnose(gather(run_dir, take_capture))
        finally:
            _end(ranks, run_dir)
    seconds = None
    if drill.expected is not None and mark.exists() and found_at is not None:
        seconds = max(0.0, found_at - mark.stat().st_mtime)
    return Outcome(drill, diagnosis, seconds)


@dataclass(frozen=True)
class _Rank:
    process: ForkServerProcess
    stay: Connection

    @property
    def over(self) -> bool:
        return not self.process.is_alive()


@functools.cache
def context() -> ForkServerContext:
    """Ranks are forked from a process that has imported torch once: a drill begins in a moment.

    It inherits that Ctrl-C is not for it, and ends with this process: interrupted imports would print a traceback.
    To be called in the main thread first.
    """
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["dtobs.drills.worker", *_IMPORTED_LATE])
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)
    return found


def rank_environment(rank: int, world: int = WORLD) -> dict[str, str]:
    """The variables that torchrun gives a worker."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "GROUP_RANK": "0",
        "OMP_NUM_THREADS": "1",
    }


def _start(
    drill: Drill, folder: Path, run_dir: Path, mark: Path, confinements: Mapping[int, Confinement]
) -> list[_Rank]:
    fields: dict[str, Any] = {"run_dir": run_dir, "wrapper": drill.wrapper, "monitor": True}
    if drill.family == "hangs":
        fields |= {"fault": drill.name, "mark": mark}
    else:
        fields |= {"loss" if drill.family == "time" else "trouble": drill.name}
    ranks = []
    for rank in range(drill.world):
        ours, theirs = context().Pipe()
        process = context().Process(
            target=worker.main,
            args=(
                drill.family,
                fields,
                rank_environment(rank, drill.world),
                folder,
                theirs,
                confinements.get(rank, Confinement()),
            ),
        )
        process.start()
        theirs.close()
        ranks.append(_Rank(process, ours))
    return ranks


def _until_found(drill: Drill, run_dir: Path, folder: Path, ranks: Sequence[_Rank], seconds: float) -> float | None:
    """Wait until the monitor has found what it should (and a moment more), or the job is over; when, in UTC seconds.

    What it finds first may be only a sign of it: a rank that runs out of memory stands still before it is killed.
    """
    deadline = time.monotonic() + seconds
    found_at: float | None = None
    another = False
    while time.monotonic() < deadline:
        codes = {entry.finding.code for entry in read_journal(RunDirectory(run_dir).findings)}
        if found_at is None and drill.expected in codes:
            found_at = time.time()
            deadline = min(deadline, time.monotonic() + _SETTLE_SECONDS)
        elif codes and found_at is None and not another:
            another = True
            deadline = min(deadline, time.monotonic() + _SECOND_THOUGHTS_SECONDS)
        if all(rank.over or (folder / f"done-{n}").exists() for n, rank in enumerate(ranks)):
            return found_at or time.time()
        time.sleep(_POLL_SECONDS)
    return found_at


def _end(ranks: Sequence[_Rank], run_dir: Path) -> None:
    for rank in ranks:
        rank.stay.close()
    for rank in ranks:
        rank.process.join(_GOODBYE_SECONDS)
        if rank.process.is_alive():
            rank.process.kill()
            rank.process.join()
    monitors = read_json(RunDirectory(run_dir).monitor_json)
    pids = [int(m["pid"]) for m in monitors.values() if isinstance(m, dict) and "pid" in m]
    deadline = time.monotonic() + _MONITOR_SECONDS
    while any(read_process(pid).alive for pid in pids) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
