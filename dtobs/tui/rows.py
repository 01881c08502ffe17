"""One row a rank: what it is doing, for how long, and its figures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from dtobs.detectors.hangs.endings import End, causes, endings
from dtobs.events import walls_ns
from dtobs.recording.rank import ENDED, Rank, State
from dtobs.recording.view import RunView

Level = Literal["ok", "wait", "warn", "bad", "done"]
"""How a state is drawn: at work, waiting for others, look here, broken, finished."""

Accused = Literal["", "warning", "critical"]
"""The worst open finding that names a rank."""

WINDOW_RANKS = 32
"""Step histories are read for the arrival times of at most this many ranks; pages are read for any number."""
_WINDOW_STEPS = 16
_LONG_LOADING_SECONDS = 30.0
_AFTER = {
    End.PEER_LOST: "lost a peer",
    End.TIMED_OUT: "gave up waiting",
    End.ABORTED: "aborted",
    End.TERMINATED: "terminated",
}
"""What became of ranks that ended because of another."""
_LEVELS: dict[State, Level] = {
    State.WAITING: "wait",
    State.SILENT: "warn",
    State.SUSPENDED: "bad",
    State.FINISHED: "done",
    State.FAILED: "bad",
    State.EXITED: "bad",
    State.INTERRUPTED: "bad",
    State.TERMINATED: "bad",
    State.DEAD: "bad",
    State.UNREACHABLE: "bad",
}


@dataclass(frozen=True)
class RankRow:
    """One rank at one moment. Times are seconds, sizes bytes; None is "not known" or "does not apply"."""

    rank: int
    host: str
    place: str  #: its coordinates in the mesh: "stage 1, shard 0"
    node: int
    state: str  #: the word of `State`
    doing: str  #: the state with what it waits for: "waits in all_reduce"
    level: Level
    step: int
    steps: bool  #: whether it takes steps of its own
    phase: str
    phase_seconds: float | None
    busy_seconds: float | None  #: own time of a step, median of the last 16
    wait_seconds: float | None  #: of a step, the host waited for communication, median of the last 16
    late_seconds: float | None  #: behind the first rank at the step's first collective, median of recent steps
    local_norm: float | None
    loss: float | None
    memory_bytes: float | None
    memory_total_bytes: float | None
    collective: str
    collective_seq: int
    heartbeat_seconds: float | None  #: since its last sign of life; None when it has ended
    accused: Accused = ""
    odd: bool = False  #: it does not wait while most others do

    @property
    def suspicious(self) -> bool:
        """Named by a finding, or in a state that asks for a look."""
        return bool(self.accused) or self.level in ("warn", "bad")


def rank_rows(view: RunView, accused: Mapping[int, Accused] | None = None) -> tuple[RankRow, ...]:
    """The rows of all ranks that recorded, by rank; `accused` has the worst severity of findings that name a rank."""
    late, blamed, usual = arrivals(view), accused or {}, _medians(view)
    rows = [_row(r, late.get(r.rank), blamed.get(r.rank, ""), usual.get(r.rank)) for r in view.each_rank()]
    rows = _victims(view, rows)
    waiting = sum(row.level == "wait" for row in rows)
    if len(rows) > 2 and 2 * waiting > len(rows):
        rows = [row if row.level == "wait" else replace(row, odd=True) for row in rows]
    return tuple(rows)


def _victims(view: RunView, rows: list[RankRow]) -> list[RankRow]:
    """Tell the ranks that ended by themselves from those that were ended, or gave up, because of them."""
    if not any(row.state in ENDED and row.level == "bad" for row in rows):
        return rows
    ended = endings(view)
    own = {end.rank for end in causes(ended, stalled=False)}
    if not own:  # nobody ended by itself: a person or a scheduler ended the job
        told = (State.TERMINATED, State.INTERRUPTED)
        return [replace(row, level="done") if row.state in told else row for row in rows]
    return [
        replace(row, level="done", doing=_AFTER.get(ended[row.rank].kind, row.state))
        if row.state in ENDED and row.rank not in own and ended[row.rank].kind is not End.EXCEPTION
        else row
        for row in rows
    ]


def _medians(view: RunView) -> dict[int, tuple[float, float]]:
    """Own time and wait of each rank in a step, median of its last steps; {} with very many ranks."""
    if len(view.ranks) > WINDOW_RANKS:
        return {}
    found = {}
    for rank in view.ranks:
        steps = view.recent_steps(rank, _WINDOW_STEPS)
        if len(steps):
            wait = np.median(steps["exposed_ns"])
            own = np.median(np.subtract(walls_ns(steps), steps["exposed_ns"]))
            found[rank] = (float(own) / 1e9, float(wait) / 1e9)
    return found


def arrivals(view: RunView) -> dict[int, float]:
    """Seconds each rank comes behind the first to the step's first collective: median of the last complete steps.

    {} with more than `WINDOW_RANKS` ranks, or when the steps do not begin with the same collective on all.
    """
    if not 2 <= len(view.ranks) <= WINDOW_RANKS:
        return {}
    window = view.steps(_WINDOW_STEPS).complete()
    records = window.records
    same = (
        (records["sync_ns"] != 0).all(axis=0)
        & (records["sync_group"] == records["sync_group"][:1]).all(axis=0)
        & (records["sync_seq"] == records["sync_seq"][:1]).all(axis=0)
    )
    if not same.any():
        return {}
    arrived = records["sync_ns"][:, same]
    behind = np.median(arrived - arrived.min(axis=0), axis=1) / 1e9
    return {rank: float(seconds) for rank, seconds in zip(view.ranks, behind, strict=True)}


def _row(rank: Rank, late: float | None, accused: Accused, usual: tuple[float, float] | None) -> RankRow:
    page, state = rank.page, rank.state
    over = state in ENDED
    memory, total = _float(page, "device_bytes"), _float(page, "device_total_bytes")
    if memory is None or memory == 0:
        memory, total = _float(page, "rss_bytes"), None
    done = rank.get("steps_done") > 0
    own, wait = usual or (rank.get("busy_ns") / 1e9, rank.get("exposed_ns") / 1e9)
    call = rank.call
    return RankRow(
        rank=rank.rank,
        host=rank.host,
        place=", ".join(f"{name} {at}" for name, at in rank.place.items()),
        node=rank.get("node"),
        state=state.value,
        doing=_doing(rank),
        level=_level(rank),
        step=rank.step,
        steps=not rank.stepless,
        phase="" if over else rank.phase,
        phase_seconds=rank.phase_seconds,
        busy_seconds=own if done else None,
        wait_seconds=wait if done else None,
        late_seconds=late,
        local_norm=_said(page, "local_norm", done),
        loss=_said(page, "loss", done),
        memory_bytes=memory,
        memory_total_bytes=total,
        collective=call.op.op if call is not None else "",
        collective_seq=call.seq if call is not None else 0,
        heartbeat_seconds=rank.silent_seconds,
        accused=accused,
    )


def _doing(rank: Rank) -> str:
    waits_in = rank.waits_in if rank.state is State.WAITING else None
    return f"waits in {waits_in.short}" if waits_in is not None else rank.state.value


def _level(rank: Rank) -> Level:
    if rank.state is State.LOADING and (rank.phase_seconds or 0.0) >= _LONG_LOADING_SECONDS:
        return "warn"
    return _LEVELS.get(rank.state, "ok")


def _float(page: np.void, name: str) -> float | None:
    value = float(page[name])
    return value if math.isfinite(value) else None


def _said(page: np.void, name: str, done: bool) -> float | None:
    # NaN stands for "not measured" as well as for a loss that is NaN: only the recorder's counter tells them apart.
    value = float(page[name])
    if math.isfinite(value) or (math.isinf(value) and done):
        return value
    return value if done and int(page["nonfinite_steps"]) else None
