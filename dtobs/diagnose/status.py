"""What each rank is doing or how it ended, in the words of the report."""

from __future__ import annotations

from dtobs.diagnose.model import RankStatus
from dtobs.recording.rank import Rank
from dtobs.recording.view import RunView

_MAX_FRAMES = 32


def statuses(view: RunView) -> dict[int, RankStatus]:
    """The status of every rank that recorded, by rank."""
    return {rank.rank: _status(rank) for rank in view.each_rank()}


def _status(rank: Rank) -> RankStatus:
    call, frame, stack = rank.call, rank.user_frame, rank.stack
    return RankStatus(
        rank=rank.rank,
        state=rank.state.value,
        step=None if rank.stepless else rank.step,
        phase=rank.phase,
        last_collective=str(call or ""),
        site=str(call.site or "") if call is not None else "",
        waits_in=str(rank.waits_in or ""),
        waited_seconds=_tenths(rank.waited_seconds),
        silent_seconds=_tenths(rank.silent_seconds),
        pid=rank.pid,
        host=rank.host,
        ending=rank.ending,
        stack=tuple(str(frame) for frame in stack.frames[:_MAX_FRAMES]) if stack is not None else (),
        line=str(frame or ""),
    )


def _tenths(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)
