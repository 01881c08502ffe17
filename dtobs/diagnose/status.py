"""What each rank is doing or how it ended, in the words of the report."""

from __future__ import annotations

import numpy as np

from dtobs.diagnose.model import RankStatus
from dtobs.events import FIRST_CUSTOM_PHASE, Phase, RankState
from dtobs.host.stacks import main_thread
from dtobs.recording.view import RunView

_MAX_FRAMES = 32


def statuses(view: RunView) -> dict[int, RankStatus]:
    """The status of every rank that recorded, by rank."""
    return {rank: _status(view, rank) for rank in view.ranks}


def _status(view: RunView, rank: int) -> RankStatus:
    page = view.page(rank)
    meta, process = view.meta(rank), view.process(rank)
    alive = (process is None or process.alive) and rank not in view.out_of_reach
    waiting_since = int(page["wait_since_ns"])
    return RankStatus(
        rank,
        _state(view, rank, page),
        int(page["step"]),
        _phase(view, rank, int(page["phase"])),
        _last_collective(view, rank, page),
        str(meta.sites.get(int(page["collective_site"]), "")),
        _seconds(view.now_ns - waiting_since) if waiting_since and alive else None,
        _seconds(view.now_ns - int(page["heartbeat_ns"])) if alive else None,
        int(page["pid"]),
        str(meta.process.get("host", "")),
        "" if process is None or process.alive else process.ending,
        _stack(view, rank, page),
    )


def _state(view: RunView, rank: int, page: np.void) -> str:
    state = int(page["state"])
    if state in (RankState.CLOSED, RankState.FAILED):
        return "closed" if state == RankState.CLOSED else "failed"
    if rank in view.out_of_reach:
        return "unknown"
    process = view.process(rank)
    if process is not None and not process.alive:
        return "dead"
    if process is not None and process.stopped:
        return "suspended"
    if int(page["wait_since_ns"]):
        return "waiting"
    if int(page["phase"]) == Phase.DATA:
        return "loading"
    named: dict[int, str] = {RankState.STARTING: "starting", RankState.RUNNING: "running"}
    return named.get(state, "unknown")


def _phase(view: RunView, rank: int, phase: int) -> str:
    if phase >= FIRST_CUSTOM_PHASE:
        return view.meta(rank).phases.get(phase, "")
    return Phase(phase).name.lower() if phase in set(Phase) and phase != Phase.NONE else ""


def _last_collective(view: RunView, rank: int, page: np.void) -> str:
    seq = int(page["collective_seq"])
    if not seq:
        return ""
    meta = view.meta(rank)
    op, group = meta.ops.get(int(page["collective_op"])), meta.groups.get(int(page["collective_group"]))
    return f"{op or 'collective'} #{seq}{f' of {group}' if group is not None else ''}"


def _stack(view: RunView, rank: int, page: np.void) -> tuple[str, ...]:
    capture = view.capture
    if capture is None or rank not in capture.ranks or int(page["heartbeat_ns"]) > capture.taken_ns:
        return ()
    stack = main_thread(capture.ranks[rank].stacks)
    return tuple(str(frame) for frame in stack.frames[:_MAX_FRAMES]) if stack is not None else ()


def _seconds(nanoseconds: int) -> float:
    return round(max(0, nanoseconds) / 1e9, 1)
