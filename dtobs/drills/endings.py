"""The matrix of endings: a hang, then somebody ends the job, and the hang must still be what `dtobs diagnose` says.

A cell is a layout, a kind of hang, a way of ending, and whether the hang had been found by then. The way "asked" ends
nothing: somebody only asks, before there is an alarm.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dtobs.detectors.hangs.stall import quiet_period
from dtobs.diagnose import Diagnosis, diagnose, gather
from dtobs.diagnose.gather import TakeCapture
from dtobs.drills import launcher
from dtobs.drills.faults import FAULTS, ODD, WORLD
from dtobs.drills.perform import context, rank_environment
from dtobs.errors import DtobsError, TargetError
from dtobs.findings import CATALOGUE, Confidence
from dtobs.host.process import read_process, start_ticks
from dtobs.recording.journal import read_journal
from dtobs.recording.rundir import RunDirectory, read_json
from dtobs.recording.view import load_run

When = Literal["before", "after"]
_WHEN: tuple[When, ...] = ("before", "after")
WAYS: dict[str, str] = {
    "asked": "nobody ends it: somebody asks what it stands in",
    "ctrl-c": "SIGINT to the launcher and all ranks",
    "terminate": "SIGTERM to the launcher, which passes it on",
    "kill-all": "SIGKILL to the launcher and all ranks",
    "node-lost": "SIGKILL to the launcher, all ranks and the monitor",
    "kill-culprit": "SIGKILL to the rank that the others wait for",
    "kill-waiter": "SIGKILL to a rank that waits",
    "launcher-killed": "SIGKILL to the launcher; the ranks stay",
    "own-timeout": "the process group's own timeout",
}
_QUIET_SECONDS = {"before": 30.0, "after": 2.0}  # the hang timeouts
_EARLY_SECONDS = 15.0
_STANDS_SECONDS = 12.0  # before somebody who does not wait for the alarm ends the job
_SEEN_SECONDS = 2.0  # for the monitor to look at a standstill
_LIMIT_SECONDS = {"before": 12.0, "after": 30.0}  # the process group's own timeouts
_PATIENCE_SECONDS = 90.0
_GONE_SECONDS = 20.0
_ORPHANS_SECONDS = 2.0
_POLL_SECONDS = 0.1
_STAYS = {"early-exit", "uneven-inputs"}
"""Faults whose odd rank has left: nobody can kill it any more, and nothing of it waits."""
_OWN_GROUPS = {"crossed-groups", "skipped-group", "no-rendezvous"}
"""Faults that wait with a timeout of their own."""


@dataclass(frozen=True)
class MatrixCell:
    """One field of the matrix. Without an alarm, the end comes `stands_seconds` after the strike."""

    layout: str
    fault: str
    way: str
    when: When
    quiet_seconds: float
    stands_seconds: float = _STANDS_SECONDS

    @property
    def expected(self) -> str:
        """The code that must be the verdict."""
        fault = FAULTS[self.fault]
        return fault.code_under.get(self.layout, fault.code or "")

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that it must name."""
        return (ODD,) if FAULTS[self.fault].names == "odd" else tuple(range(WORLD))


@dataclass(frozen=True)
class JudgedCell:
    """A cell that was played. `wrong` says what is wrong with the answer, "" when nothing is."""

    cell: MatrixCell
    diagnosis: Diagnosis | None
    wrong: str

    def to_json(self) -> dict[str, Any]:
        """A row of the table."""
        verdict = self.diagnosis.verdict if self.diagnosis is not None else None
        cell = self.cell
        return {
            "fault": cell.fault,
            "wrapper": cell.layout,
            "way": cell.way,
            "when": cell.when,
            "expected": cell.expected,
            "found": verdict.code if verdict is not None else None,
            "ranks": list(verdict.ranks) if verdict is not None else [],
            "confidence": verdict.confidence.value if verdict is not None else None,
            "summary": verdict.summary if verdict is not None else None,
            "wrong": self.wrong or None,
        }


def cells(*, early: bool = False) -> list[MatrixCell]:
    """The whole matrix; of `early` ones those that nobody ends, at the default hang timeout."""
    kinds = [f for f in FAULTS.values() if f.code and f.needs_stall and not f.needs and f.code != "network-stalled"]
    every = [
        MatrixCell(layout, fault.name, way, when, _QUIET_SECONDS[when])
        for fault, way, when in itertools.product(kinds, WAYS, _WHEN)
        for layout in fault.wrappers
    ]
    found = [cell for cell in every if _applies(cell)]
    if not early:
        return found
    return [replace(c, quiet_seconds=0.0, stands_seconds=_EARLY_SECONDS) for c in found if c.way == "asked"]


def _applies(cell: MatrixCell) -> bool:
    if cell.way == "asked":
        return cell.when == "before"
    if cell.way == "kill-culprit" and (cell.fault in _STAYS or FAULTS[cell.fault].names == "all"):
        return False
    return cell.way != "own-timeout" or (cell.fault not in _OWN_GROUPS and cell.layout != "hsdp")


def some(every: Sequence[MatrixCell], seed: int = 0) -> list[MatrixCell]:
    """A few cells that have every layout, every kind of hang, and every way of ending before and after the alarm."""
    shuffled = random.Random(seed).sample(list(every), len(every))
    taken: list[MatrixCell] = []
    seen: set[tuple[str, ...]] = set()
    for cell in shuffled:
        covers = {(cell.layout,), (cell.fault,), (cell.way, cell.when)}
        if covers - seen:
            seen |= covers
            taken.append(cell)
    return taken


def judge(cell: MatrixCell, diagnosis: Diagnosis) -> str:
    """What is wrong with the answer, in words; "" when it says the hang, its ranks, and no other cause."""
    verdict = diagnosis.verdict
    if verdict is None:
        return f"nothing found instead of {cell.expected}"
    killed = {"kill-culprit": (ODD,), "kill-waiter": (0,)}.get(cell.way)
    if killed == verdict.ranks and verdict.code == "rank-dead" and cell.when == "before":
        return ""  # a rank that was killed alone before there was a hang is what stopped the others
    if verdict.code != cell.expected:
        return f"{verdict.code} of ranks {list(verdict.ranks)} instead of {cell.expected}"
    if verdict.ranks != cell.ranks:
        return f"ranks {list(verdict.ranks)} instead of {list(cell.ranks)}"
    others = {f.code for f in diagnosis.findings if CATALOGUE[f.code].family == "hangs"} - {cell.expected}
    if others:
        return f"also accused of {', '.join(sorted(others))}"
    if "kill -CONT" in verdict.next_step and diagnosis.ranks[ODD].ending:
        return "tells to resume a process that is gone"
    if cell.way == "asked" and verdict.confidence is Confidence.CERTAIN and verdict.code != "rank-stopped":
        return "is certain of what is no alarm yet"
    return ""


@dataclass(frozen=True)
class _Process:
    """A process of the job, told from a later one of the same number."""

    pid: int
    ticks: int

    @property
    def alive(self) -> bool:
        return read_process(self.pid, self.ticks).alive

    def send(self, number: int) -> None:
        """Send a signal, where it still lives."""
        if self.alive:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass


def play_all(
    chosen: Sequence[MatrixCell],
    folder: Path,
    take_capture: TakeCapture,
    *,
    at_once: int = 1,
    told: Callable[[JudgedCell], None] = lambda judged: None,
) -> list[JudgedCell]:
    """Play the cells below `folder`, `at_once` at a time; `told` hears of each in order, as it is known."""

    def one(cell: MatrixCell) -> JudgedCell:
        name = f"{cell.fault}-{cell.layout}-{cell.way}-{cell.when}"
        try:
            return play(cell, folder / name, take_capture)
        except (DtobsError, OSError, KeyError) as error:
            return JudgedCell(cell, None, f"could not be played: {error}")

    played = []
    context()  # only the main thread may start it
    with ThreadPoolExecutor(at_once, thread_name_prefix="endings") as pool:
        for judged in pool.map(one, chosen):
            told(judged)
            played.append(judged)
    return played


def play(cell: MatrixCell, folder: Path, take_capture: TakeCapture) -> JudgedCell:
    """Run the cell on two ranks below `folder`, which it makes, and judge the answer; nothing is left running."""
    folder.mkdir(parents=True)
    run_dir = folder / "run"
    pipes = [context().Pipe() for _ in range(WORLD)]
    fields: dict[str, Any] = {
        "run_dir": run_dir,
        "wrapper": cell.layout,
        "fault": cell.fault,
        "mark": folder / "struck",
        "hang_timeout": cell.quiet_seconds or None,
        "timeout_seconds": _LIMIT_SECONDS[cell.when] if cell.way == "own-timeout" else 300.0,
    }
    starter = context().Process(
        target=launcher.main,
        args=(fields, [rank_environment(rank) for rank in range(WORLD)], folder, [p[1] for p in pipes]),
    )
    starter.start()
    processes: dict[str, _Process] = {}
    try:
        _until(lambda: (folder / "struck").exists(), _PATIENCE_SECONDS)
        if not (folder / "struck").exists():
            raise TargetError(f"the fault did not strike within {_PATIENCE_SECONDS:.0f} s: is the machine too busy?")
        if cell.when == "after":
            _until(lambda: cell.expected in _found(run_dir), _PATIENCE_SECONDS)
        elif cell.way == "own-timeout":  # nobody need wait for that, but for the monitor that sees it
            _until(lambda: bool(read_json(RunDirectory(run_dir).monitor_json)), _PATIENCE_SECONDS)
        else:
            _until(lambda: _stands(run_dir, cell.stands_seconds), _PATIENCE_SECONDS)
        processes = _processes(folder)
        _end(cell, processes)
        diagnosis = diagnose(gather(run_dir, take_capture))
    finally:
        for _, process in sorted((processes or _processes(folder)).items(), reverse=True):  # the launcher last
            process.send(signal.SIGKILL)
        for pipe in itertools.chain(*pipes):
            pipe.close()
        starter.join()
    return JudgedCell(cell, diagnosis, judge(cell, diagnosis))


def _end(cell: MatrixCell, processes: dict[str, _Process]) -> None:
    """End the job in the way of the cell, and wait until everything that shall end has ended."""
    if cell.way == "asked":
        return
    launching, ranks = processes["launcher"], [processes[str(rank)] for rank in range(WORLD)]
    monitors = [process for name, process in processes.items() if name.startswith("monitor")]
    number, whom = {
        "ctrl-c": (signal.SIGINT, [launching, *ranks]),
        "terminate": (signal.SIGTERM, [launching]),
        "kill-all": (signal.SIGKILL, [launching, *ranks]),
        "node-lost": (signal.SIGKILL, [*monitors, launching, *ranks]),
        "kill-culprit": (signal.SIGKILL, [ranks[ODD]]),
        "kill-waiter": (signal.SIGKILL, [ranks[0]]),
        "launcher-killed": (signal.SIGKILL, [launching]),
    }.get(cell.way, (0, []))
    for process in whom:
        process.send(number)
    if cell.way == "launcher-killed":
        time.sleep(_ORPHANS_SECONDS)
    else:
        _until(
            lambda: not any(process.alive for process in (*ranks, *monitors)),
            _PATIENCE_SECONDS if cell.way == "own-timeout" else _GONE_SECONDS,
        )


def _stands(run_dir: Path, seconds: float) -> bool:
    """Whether no rank has moved for so long, and for longer than the run's own slow steps on a busy machine excuse."""
    try:
        quiet = quiet_period(load_run(run_dir))
    except TargetError:
        return False
    if quiet is None:
        return False
    # In a long phase only the monitor, which sees whether a core is used, can tell how soon it is a standstill.
    early = quiet.early_seconds if quiet.early_seconds < quiet.threshold_seconds else 0.0
    return quiet.seconds >= max(seconds, early + _SEEN_SECONDS)


def _found(run_dir: Path) -> set[str]:
    return {entry.finding.code for entry in read_journal(RunDirectory(run_dir).findings) if entry.event == "found"}


def _processes(folder: Path) -> dict[str, _Process]:
    """The launcher, the ranks and the monitor of a job that runs, by name."""
    pids = {path.name.removeprefix("pid-"): int(path.read_text()) for path in folder.glob("pid-*") if not path.suffix}
    monitors = read_json(RunDirectory(folder / "run").monitor_json)
    pids |= {f"monitor-{n}": int(m["pid"]) for n, m in monitors.items() if isinstance(m, dict) and "pid" in m}
    return {name: _Process(pid, start_ticks(pid)) for name, pid in pids.items()}


def _until(true: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def counted(judged: Iterable[JudgedCell]) -> list[tuple[str, When, int, int, int]]:
    """(way, when, right, played, tried) for every way that was tried, in the order of `WAYS`."""
    played = list(judged)
    rows = []
    for way, when in itertools.product(WAYS, _WHEN):
        mine = [j for j in played if (j.cell.way, j.cell.when) == (way, when)]
        if mine:
            done = [j for j in mine if j.diagnosis is not None]
            rows.append((way, when, sum(not j.wrong for j in done), len(done), len(mine)))
    return rows
