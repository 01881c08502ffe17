"""The attempts before the present one: how far each came and when, so that a restart can be told what it cost.

Times are moved to one clock: a caller names it by its boot and its offset to UTC. Ranks of one host and boot share a
clock; others are brought together through UTC, as well as it was kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dtobs.errors import RecordingError
from dtobs.events import STEP_DTYPE
from dtobs.recording.clocks import shift
from dtobs.recording.meta import read_meta
from dtobs.recording.ring import adapt, read_ring
from dtobs.recording.ring_tail import read_tail
from dtobs.recording.rundir import RunDirectory


@dataclass(frozen=True)
class Clock:
    """An axis of time: the monotonic clock of one boot of one host, and UTC minus it, in nanoseconds."""

    boot_id: str
    offset_ns: int


@dataclass(frozen=True)
class Attempt:
    """How far an earlier attempt came, by one rank that recorded it; `last_step` is -1, `end_ns` 0 before one ended."""

    number: int
    attach_ns: int
    last_step: int = -1
    end_ns: int = 0  #: when its last step ended
    numbered: bool = False  #: the training said the steps' numbers: they go on where a checkpoint was taken


@dataclass(frozen=True)
class Setback:
    """What a restart cost so far."""

    steps: int  #: that had been done already and are done again
    seconds: float  #: since the last step of the attempts before ended


def earlier_attempts(root: Path, before: int, clock: Clock) -> list[Attempt]:
    """The attempts 0 … `before` - 1 that left a recording, each by its lowest rank, times on `clock`."""
    run = RunDirectory(root)
    return [attempt for number in range(before) if (attempt := _attempt(run, number, clock)) is not None]


def attempt_steps(root: Path, rank: int, number: int, clock: Clock) -> npt.NDArray[np.void]:
    """The steps of a rank in an earlier attempt, STEP_DTYPE, oldest first, on `clock`; empty where unreadable."""
    run = RunDirectory(root)
    path = run.steps(rank, number)
    if not path.exists():
        return np.zeros(0, STEP_DTYPE)
    try:
        records = adapt(path, read_ring(path), STEP_DTYPE)
    except RecordingError:
        return np.zeros(0, STEP_DTYPE)
    return shift(records, _shift_ns(read_meta(run.meta(rank, number)).process, clock))


def highest_finished_step(attempts: Sequence[Attempt]) -> int:
    """The highest step that any of the attempts finished, as far as their numbers say so; -1 for none."""
    return max((a.last_step for a in attempts if a.numbered), default=-1)


def last_end_ns(attempts: Sequence[Attempt]) -> int:
    """When the newest step of all attempts ended; before any did, when the first attempt began; 0 without attempts."""
    ends = [a.end_ns for a in attempts if a.end_ns]
    return ends[-1] if ends else next((a.attach_ns for a in attempts), 0)


def restart_cost(attempts: Sequence[Attempt], step: int, now_ns: int) -> Setback | None:
    """What it costs to go on after `step`; None where no attempt before has finished one."""
    if not any(a.end_ns for a in attempts):
        return None
    return Setback(max(0, highest_finished_step(attempts) - step), max(0, now_ns - last_end_ns(attempts)) / 1e9)


def _attempt(run: RunDirectory, number: int, clock: Clock) -> Attempt | None:
    rank = next((r for r in run.ranks() if run.steps(r, number).exists()), None)
    if rank is None:
        return None
    process = read_meta(run.meta(rank, number)).process
    by = _shift_ns(process, clock)
    begun = Attempt(number, _integer(process, "attach_ns") + by)
    try:
        path = run.steps(rank, number)
        last = shift(adapt(path, read_tail(path, 1), STEP_DTYPE), by)
    except RecordingError:
        return begun
    if not len(last):
        return begun
    numbered = bool(process.get("steps_numbered"))
    return replace(begun, last_step=int(last["step"][0]), end_ns=int(last["end_ns"][0]), numbered=numbered)


def _shift_ns(process: dict[str, Any], clock: Clock) -> int:
    """What to add to the times of a process to have them on `clock`."""
    if process.get("boot_id") == clock.boot_id or "clock_offset_ns" not in process:
        return 0
    return _integer(process, "clock_offset_ns") - clock.offset_ns


def _integer(process: dict[str, Any], name: str) -> int:
    value = process.get(name)
    return value if isinstance(value, int) else 0
