"""How each rank ended, if it did, and whether that was its own doing or the consequence of a peer's end.

When one rank of a job fails, its peers see broken connections or run into timeouts, and the launcher terminates
what is left. Only what came first is a cause.
"""

from __future__ import annotations

import re
import signal as signals
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dtobs.events import RankState
from dtobs.host.process import ProcessState
from dtobs.recording.view import RunView


class End(Enum):
    """Kinds of ending."""

    OPEN = "has not ended"
    CLOSED = "closed its session"
    EXITED = "exited with code 0"
    EXCEPTION = "raised an exception of its own"
    TIMED_OUT = "gave up waiting for its peers"
    PEER_LOST = "lost the connection to a peer"
    INTERRUPTED = "was interrupted from the keyboard"
    TERMINATED = "was told to end"
    ABORTED = "aborted"
    DIED = "died"


@dataclass(frozen=True)
class Ending:
    """How one rank ended. `t_ns` is on the clock of `when` (comparable between hosts), 0 when unknown."""

    rank: int
    kind: End
    t_ns: int = 0
    exception: dict[str, Any] | None = None
    process: ProcessState | None = None

    @property
    def by_itself(self) -> bool:
        """Whether nothing from outside ended it."""
        return self.kind in (End.EXCEPTION, End.DIED)

    @property
    def about_communication(self) -> bool:
        """Whether its exception came out of the communication library."""
        return self.exception is not None and bool(_COMMUNICATION.search(_text(self.exception)))

    @property
    def timed(self) -> bool:
        """Whether it is known when it ended (else `t_ns` is only the last sign of life)."""
        if self.exception is not None or self.process is None:
            return True
        return self.process.exit_code is not None or self.process.oom_killed or self.process.ended_ns > 0

    @property
    def over(self) -> bool:
        """Whether the rank does no more training."""
        return self.kind is not End.OPEN


_TERMINATION = {-signals.SIGTERM, -signals.SIGINT, -signals.SIGHUP}
"""A launcher's or a scheduler's way to end a process."""
_TOGETHER_NS = 5_000_000_000
"""Deaths this near each other have one cause from outside; launchers kill stragglers much later than that."""
_TIMEOUT = re.compile(
    r"timed? ?out|timeout|watchdog caught collective|deadline exceeded|wait time exceeded", re.IGNORECASE
)
_PEER_LOST = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection (was )?(closed|refused|reset|aborted|lost)|pair closure"
    r"|remote process exited|ncclremoteerror|ncclsystemerror|nccl communicator was aborted|socket closed"
    r"|failed to (send|recv)|read error|write error|peer (is )?(gone|closed)",
    re.IGNORECASE,
)
_COMMUNICATION = re.compile(
    r"gloo|nccl|c10d|processgroup|process group|distbackenderror|distnetworkerror|diststoreerror|tcpstore|rank",
    re.IGNORECASE,
)


def endings(view: RunView) -> dict[int, Ending]:
    """How every rank that recorded ended, by rank."""
    return {rank: _ending(view, rank) for rank in view.ranks}


def _ending(view: RunView, rank: int) -> Ending:
    page = view.page(rank)
    process = view.process(rank)
    state = int(page["state"])
    offset = int(page["clock_offset_ns"])
    gone_ns = offset + (process.ended_ns if process and process.ended_ns else _last_sign_of_life_ns(view, rank))
    if state == RankState.CLOSED:
        # Whatever happens after close() is not the training's: Gloo aborts about one exit in ten there.
        return Ending(rank, End.CLOSED, offset + int(page["heartbeat_ns"]), None, process)
    raised = _last_exception(view, rank) if state == RankState.FAILED else None
    if raised is not None:
        at = offset + int(raised.get("t_ns") or page["heartbeat_ns"])
        return Ending(rank, _kind_of_exception(raised), at, raised, process)
    if process is None or process.alive:
        if state == RankState.FAILED:
            return Ending(rank, End.EXCEPTION, gone_ns, None, process)
        return Ending(rank, End.OPEN, 0, None, process)
    if process.oom_killed or process.exit_code is None:
        return Ending(rank, End.DIED, gone_ns, None, process)
    if process.exit_code == 0:
        return Ending(rank, End.EXITED, gone_ns, None, process)
    if process.exit_code == -signals.SIGABRT:
        return Ending(rank, End.ABORTED, gone_ns, None, process)
    kind = End.TERMINATED if process.exit_code in _TERMINATION else End.DIED
    return Ending(rank, kind, gone_ns, None, process)


def _last_sign_of_life_ns(view: RunView, rank: int) -> int:
    """Monotonic time at which the rank published something or a capture saw its process alive."""
    published, capture = int(view.page(rank)["heartbeat_ns"]), view.capture
    if capture is None or rank not in capture.ranks or not capture.ranks[rank].process.alive:
        return published
    return max(published, capture.taken_ns)


def _last_exception(view: RunView, rank: int) -> dict[str, Any] | None:
    """The exception that ended the rank: the last of its main thread; those of other threads did not end it."""
    raised = view.meta(rank).exceptions
    main = [e for e in raised if not e.get("thread")] or raised
    return max(main, key=lambda e: int(e.get("t_ns") or 0)) if main else None


def _kind_of_exception(exception: dict[str, Any]) -> End:
    type_, text = str(exception.get("type", "")), _text(exception)
    if type_.rpartition(".")[2] == "KeyboardInterrupt":
        return End.INTERRUPTED
    if type_.rpartition(".")[2] == "SystemExit":
        return End.EXITED
    if not _COMMUNICATION.search(text) and type_ not in ("ConnectionResetError", "BrokenPipeError"):
        return End.EXCEPTION  # a user's own timeout or connection is a cause like any other
    if _PEER_LOST.search(text):
        return End.PEER_LOST
    return End.TIMED_OUT if _TIMEOUT.search(text) else End.EXCEPTION


def _text(exception: dict[str, Any]) -> str:
    return f"{exception.get('type', '')}: {exception.get('message', '')}"


def causes(found: dict[int, Ending], *, stalled: bool) -> list[Ending]:
    """The endings that explain the others, the earliest first; empty when no rank ended by itself.

    Several ranks may be causes (the same bug on all, a machine that went down). Ranks that somebody terminated are
    causes only where peers then lost them or wait for them, and nothing else explains that. `stalled`: whether those
    that are left have stopped moving.
    """
    own = sorted((e for e in found.values() if e.by_itself and e.timed), key=lambda e: (e.t_ns, e.rank))
    if own:
        return [e for e in own if _is_cause_beside(e, own[0])]
    unseen = [e for e in found.values() if e.kind is End.DIED]
    if unseen:
        return sorted(unseen, key=lambda e: e.rank)
    kinds = {e.kind for e in found.values()}
    terminated = [e for e in found.values() if e.kind is End.TERMINATED]
    missed = End.PEER_LOST in kinds or (stalled and End.OPEN in kinds)
    if terminated and missed and End.TIMED_OUT not in kinds:
        return sorted(terminated, key=lambda e: (e.t_ns, e.rank))
    return []


def _is_cause_beside(ending: Ending, first: Ending) -> bool:
    """Whether `ending` is a cause of its own although `first` came before it."""
    if ending.kind is End.EXCEPTION or (ending.process is not None and ending.process.oom_killed):
        return True
    return first.kind is End.DIED and ending.t_ns - first.t_ns < _TOGETHER_NS
