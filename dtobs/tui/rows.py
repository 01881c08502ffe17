"""One row a rank: what it is doing, for how long, and its figures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from dtobs.events import Phase, RankState
from dtobs.host.process import ProcessState, boot_id
from dtobs.recording.meta import Meta
from dtobs.recording.view import RunView

Level = Literal["ok", "wait", "warn", "bad", "done"]
"""How a state is drawn: at work, waiting for others, look here, broken, finished."""

Accused = Literal["", "warning", "critical"]
"""The worst open finding that names a rank."""

WINDOW_RANKS = 32
"""Step histories are read for the arrival times of at most this many ranks; pages are read for any number."""
_WINDOW_STEPS = 16
_LONG_SECONDS = 1.0
_SILENT_SECONDS = 30.0
_SAME_CLOCK_NS = 1_000_000_000


@dataclass(frozen=True)
class RankRow:
    """One rank at one moment. Times are seconds, sizes bytes; None is "not known" or "does not apply"."""

    rank: int
    host: str
    node: int
    state: str
    level: Level
    step: int
    phase: str
    phase_seconds: float | None
    busy_seconds: float | None  #: own time of the last step
    wait_seconds: float | None  #: of the last step, the host waited for communication
    data_seconds: float | None
    late_seconds: float | None  #: behind the first rank at the step's first collective, median of recent steps
    local_norm: float | None
    loss: float | None
    memory_bytes: float | None
    memory_total_bytes: float | None
    collective: str
    collective_seq: int
    heartbeat_seconds: float | None  #: since its last sign of life; None when it has ended
    accused: Accused = ""

    @property
    def suspicious(self) -> bool:
        """Named by a finding, or in a state that asks for a look."""
        return bool(self.accused) or self.level in ("warn", "bad")


def rank_rows(view: RunView, accused: Mapping[int, Accused] | None = None) -> tuple[RankRow, ...]:
    """The rows of all ranks that recorded, by rank; `accused` has the worst severity of findings that name a rank."""
    accused = accused or {}
    now = view.now_ns - clock_shifts(view)
    late = arrivals(view)
    unknown = view.out_of_reach
    rows = tuple(
        _row(page, view.meta(rank), view.process(rank), int(then), late.get(rank), accused.get(rank, ""))
        for page, rank, then in zip(view.pages, view.ranks, now, strict=True)
    )
    return tuple(replace(r, state="out of reach", level="bad") if r.rank in unknown else r for r in rows)


def clock_shifts(view: RunView) -> npt.NDArray[np.int64]:
    """int64[R]: what to take from `view.now_ns` to have it on each rank's own monotonic clock.

    Hosts count from their own start; the offset to UTC that every page carries brings them together.
    """
    offsets = view.pages["clock_offset_ns"].astype(np.int64)
    if not len(offsets) or int(offsets.max()) - int(offsets.min()) < _SAME_CLOCK_NS:
        return np.zeros(len(offsets), np.int64)
    here = [i for i, r in enumerate(view.ranks) if view.meta(r).process.get("boot_id") == boot_id()]
    reference = offsets[here[0]] if here else offsets[int(view.pages["heartbeat_ns"].argmax())]
    shifts: npt.NDArray[np.int64] = offsets - reference
    return shifts


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
    arrived = (records["sync_ns"][:, same] + view.pages["clock_offset_ns"][:, None]).astype(np.int64)
    behind = np.median(arrived - arrived.min(axis=0), axis=1) / 1e9
    return {rank: float(seconds) for rank, seconds in zip(view.ranks, behind, strict=True)}


def phase_name(number: int, meta: Meta) -> str:
    """The name of a phase, "" outside of any."""
    if number == Phase.NONE:
        return ""
    try:
        return Phase(number).name.lower()
    except ValueError:
        return meta.phases.get(number, f"phase {number}")


def op_name(number: int, meta: Meta) -> str:
    """The name of a collective, "" for none."""
    if not number:
        return ""
    op = meta.ops.get(number)
    return op.op if op else f"#{number:08x}"


def seconds_since(now_ns: int, then_ns: int) -> float | None:
    """Seconds from `then_ns`, None when that is not set; never below 0."""
    return max(0, now_ns - then_ns) / 1e9 if then_ns else None


def _row(
    page: np.void, meta: Meta, process: ProcessState | None, now: int, late: float | None, accused: Accused
) -> RankRow:
    state, level = _state(page, meta, process, now)
    over = level == "done" or (process is not None and not process.alive)
    phase = int(page["phase"])
    memory, total = _float(page, "device_bytes"), _float(page, "device_total_bytes")
    if memory is None or memory == 0:
        memory, total = _float(page, "rss_bytes"), None
    done = int(page["steps_done"]) > 0
    return RankRow(
        rank=int(page["rank"]),
        host=str(meta.process.get("host", "")),
        node=int(page["node"]),
        state=state,
        level=level,
        step=int(page["step"]),
        phase="" if over else phase_name(phase, meta),
        phase_seconds=None if over or not phase else seconds_since(now, int(page["phase_begin_ns"])),
        busy_seconds=int(page["busy_ns"]) / 1e9 if done else None,
        wait_seconds=int(page["exposed_ns"]) / 1e9 if done else None,
        data_seconds=int(page["data_ns"]) / 1e9 if done else None,
        late_seconds=late,
        local_norm=_said(page, "local_norm", done),
        loss=_said(page, "loss", done),
        memory_bytes=memory,
        memory_total_bytes=total,
        collective=op_name(int(page["collective_op"]), meta),
        collective_seq=int(page["collective_seq"]),
        heartbeat_seconds=None if over else seconds_since(now, int(page["heartbeat_ns"])),
        accused=accused,
    )


def _state(page: np.void, meta: Meta, process: ProcessState | None, now: int) -> tuple[str, Level]:
    said = int(page["state"])
    if said == RankState.CLOSED:
        return "finished", "done"
    if said == RankState.FAILED:
        return "failed", "bad"
    if process is not None and not process.alive:
        return ("killed" if process.exit_code is not None and process.exit_code < 0 else "dead"), "bad"
    if process is not None and process.stopped:
        return "stopped", "bad"
    waiting = seconds_since(now, int(page["wait_since_ns"]))
    if waiting is not None and waiting >= _LONG_SECONDS:
        return f"waits in {op_name(int(page['collective_op']), meta) or 'a collective'}", "wait"
    silent = seconds_since(now, int(page["heartbeat_ns"])) or 0.0
    level: Level = "warn" if silent >= _SILENT_SECONDS else "ok"
    if said == RankState.STARTING:
        return "starting", level
    if int(page["phase"]) == Phase.DATA:
        in_data = seconds_since(now, int(page["phase_begin_ns"])) or 0.0
        return "data", ("warn" if level == "warn" or in_data >= _SILENT_SECONDS else "ok")
    return "running", level


def _float(page: np.void, name: str) -> float | None:
    value = float(page[name])
    return value if math.isfinite(value) else None


def _said(page: np.void, name: str, done: bool) -> float | None:
    # NaN stands for "not measured" as well as for a loss that is NaN: only the recorder's counter tells them apart.
    value = float(page[name])
    if math.isfinite(value) or (math.isinf(value) and done):
        return value
    return value if done and int(page["nonfinite_steps"]) else None
