"""How each rank ended, if it did, and whether that was its own doing or the consequence of a peer's end.

When one rank of a job fails, its peers see broken connections or run into timeouts, and the launcher terminates
what is left. Only what came first is a cause.
"""

from __future__ import annotations

import math
import re
import signal as signals
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from dtobs.events import RankState
from dtobs.host.process import ProcessState, signal_name
from dtobs.recording.rank import END_SIGNALS, ending_signal
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
    signals: frozenset[int] = frozenset()  #: that reached its Python

    @property
    def by_itself(self) -> bool:
        """Whether nothing from outside ended it."""
        return self.kind in (End.EXCEPTION, End.DIED)

    @property
    def about_communication(self) -> bool:
        """Whether its exception came out of the communication library."""
        return self.exception is not None and bool(_COMMUNICATION.search(_text(self.exception)))

    @property
    def told(self) -> bool:
        """Whether somebody outside told it to end."""
        return self.kind in (End.TERMINATED, End.INTERRUPTED) or bool(self.signals & END_SIGNALS)

    @property
    def way(self) -> str:
        """How it ended, in words: "killed by SIGKILL", "was interrupted by SIGINT", "was told to end by SIGTERM"."""
        heard = self.signals & END_SIGNALS
        killed = self.process is not None and (self.process.exit_code or 0) < 0
        if self.kind is End.INTERRUPTED or (signals.SIGINT in heard and not killed):
            return "was interrupted by SIGINT"
        if heard and not killed:
            return f"was told to end by {signal_name(min(heard))}"
        return self.process.ending if self.process is not None else "gone"

    @property
    def exit_code(self) -> int:
        """The exit code it asked for or was seen to end with; 0 when unknown, or when a signal came after its close."""
        exception = (self.exception or {}) if self.kind is End.EXITED else {}
        said, asked = exception.get("message", ""), exception.get("exit_code")
        if isinstance(asked, int):
            return asked
        if isinstance(said, str) and said.isdigit():
            return int(said)
        code = (self.process.exit_code or 0) if self.process is not None else 0
        return max(0, code) if self.kind is End.CLOSED else code

    @property
    def left_by(self) -> str:
        """How it left by itself, in words: "left with exit code 1 at a.py:9 in main (no data)", "" if it did not."""
        if self.kind not in (End.CLOSED, End.EXITED) or self.exit_code <= 0:
            return ""
        said = self.exception or {}
        text = " ".join(str(said.get("message", "")).split())[:_LONGEST_MESSAGE]
        why = f" ({text})" if text and not text.isdigit() else ""
        return f"left with exit code {self.exit_code}{f' at {self.place}' if self.place else ''}{why}"

    @property
    def place(self) -> str:
        """The user's line at which its exception was raised, "" when that is not known."""
        return raised_at(self.exception or {})

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


_LONGEST_MESSAGE = 300
_TOLD_TOGETHER_NS = 20_000_000
"""Who is told to end with all others is told so near; a launcher needs longer to see that one has ended."""
TOGETHER_NS = 5_000_000_000
"""Deaths this near each other have one cause from outside; launchers kill stragglers much later than that."""
_TIMEOUT = re.compile(
    r"timed? ?out|timeout|watchdog caught collective|deadline exceeded|wait time exceeded", re.IGNORECASE
)
_TOLD = re.compile(r"SIGTERMException|SignalException|got signal: (2|15)\b")
"""What handlers of a termination signal raise: Lightning's, torch elastic's."""
_PEER_LOST = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection (was )?(closed|refused|reset|aborted|lost)|pair closure"
    r"|remote process exited|ncclremoteerror|ncclsystemerror|nccl communicator was aborted|socket closed"
    r"|failed to (send|recv)|read error|write error|peer (is )?(gone|closed)"
    r"|(communicator|process group|processgroup|connection) (was|has been|is) (aborted|shut ?down|destroyed)"
    r"|abort(ed|ing) (the )?(communicator|process group)",
    re.IGNORECASE,
)
_JOINTS = ("The above exception was the direct cause", "During handling of the above exception")
_COMMUNICATION = re.compile(
    r"gloo|nccl|c10d|processgroup|process group|distbackenderror|distnetworkerror|diststoreerror|tcpstore|rank",
    re.IGNORECASE,
)


def waited_for_peers(error: str) -> bool:
    """Whether an error is what waiting for other ranks looks like when it ends: a timeout, a closed connection."""
    return bool(_COMMUNICATION.search(error) and (_PEER_LOST.search(error) or _TIMEOUT.search(error)))


def endings(view: RunView) -> dict[int, Ending]:
    """How every rank that recorded ended, by rank."""
    found = {rank: _ending(view, rank) for rank in view.ranks}
    if any(view.rank(rank).ended_by_launcher for rank in found):  # which has ended the others as well
        unseen = [e for e in found.values() if e.kind in (End.DIED, End.TERMINATED) and not e.timed]
        waited = [e.rank for e in unseen if int(view.page(e.rank)["wait_since_ns"])]
        found |= {e.rank: replace(e, kind=End.PEER_LOST if e.rank in waited else End.TERMINATED) for e in unseen}
    return found


def _ending(view: RunView, rank: int) -> Ending:
    page = view.page(rank)
    process, heard = view.process(rank), view.signals(rank)
    state = int(page["state"])
    offset = int(page["clock_offset_ns"])
    gone_ns = offset + (process.ended_ns if process and process.ended_ns else _last_sign_of_life_ns(view, rank))
    gone = process is not None and not process.alive
    raised = _last_exception(view, rank) if state in (RankState.FAILED, RankState.CLOSED) or gone else None
    kind = _kind_of_exception(raised) if raised is not None else End.OPEN
    by_itself = raised is not None and (kind is End.INTERRUPTED or _name(raised) == "SystemExit")
    if state == RankState.CLOSED and not by_itself:
        # Whatever happens after close() is not the training's: Gloo aborts about one exit in ten there.
        return Ending(rank, _kind_of_close(process, heard), offset + int(page["heartbeat_ns"]), None, process, heard)
    if raised is not None and (state == RankState.FAILED or by_itself):
        at = offset + int(raised.get("t_ns") or page["heartbeat_ns"])
        return Ending(rank, kind, at, raised, process, heard)
    if process is None or process.alive:
        if state == RankState.FAILED:
            return Ending(rank, End.EXCEPTION, gone_ns, None, process, heard)
        return Ending(rank, End.OPEN, 0, None, process, heard)
    if view.rank(rank).ended_by_launcher:  # its training was over: signals since then say nothing of that
        return Ending(rank, End.EXITED, gone_ns, None, process)
    return Ending(rank, _kind_of_exit(process, heard), gone_ns, None, process, heard)


def _kind_of_close(process: ProcessState | None, heard: frozenset[int]) -> End:
    """How a session was closed: a program that was told to end may close it on its way out, and says so by its code."""
    code = process.exit_code if process is not None else None
    if signals.SIGINT in heard and code in (-signals.SIGINT, 128 + signals.SIGINT):
        return End.INTERRUPTED
    if signals.SIGTERM in heard and code in (-signals.SIGTERM, 128 + signals.SIGTERM):
        return End.TERMINATED
    return End.CLOSED


def _kind_of_exit(process: ProcessState, heard: frozenset[int]) -> End:
    """How a process that left no exception ended."""
    code = process.exit_code
    if process.oom_killed:
        return End.DIED
    if code == 0:
        return End.EXITED
    if code == -signals.SIGABRT:
        return End.ABORTED
    number = ending_signal(process, heard)
    return End.INTERRUPTED if number == signals.SIGINT else End.TERMINATED if number else End.DIED


def _last_sign_of_life_ns(view: RunView, rank: int) -> int:
    """Monotonic time at which the rank published something or a capture saw its process alive."""
    published, capture = int(view.page(rank)["heartbeat_ns"]), view.capture
    if capture is None or rank not in capture.ranks or not capture.ranks[rank].process.alive:
        return published
    return max(published, capture.taken_ns)


def raised_at(exception: dict[str, Any]) -> str:
    """The user's line at which an exception, as it is recorded, was raised; "" when that is not known."""
    frame = exception.get("frame")
    if not isinstance(frame, dict):
        return ""
    return f"{frame.get('file', '?')}:{frame.get('line', '?')} in {frame.get('function', '?')}"


def _last_exception(view: RunView, rank: int) -> dict[str, Any] | None:
    """The exception that ended the rank: the last of its main thread; those of other threads did not end it.

    An interrupt or an exit while a failure is on its way out is not what ended it.
    """
    raised = view.meta(rank).exceptions
    main = [e for e in raised if not e.get("thread")] or raised
    main = [e for e in main if e.get("type") not in ("KeyboardInterrupt", "SystemExit")] or main
    return max(main, key=lambda e: int(e.get("t_ns") or 0)) if main else None


def _kind_of_exception(exception: dict[str, Any]) -> End:
    """What the exception says of its rank: the first link of its chain that is a consequence makes it one."""
    name = _name(exception)
    if name == "KeyboardInterrupt":
        return End.INTERRUPTED
    if name == "SystemExit":  # its message is the error for which the program left with a code of its own
        kind = _kind_of_link(exception)
        return kind if kind in (End.PEER_LOST, End.TIMED_OUT) else End.EXITED
    for link in (exception, *_chain(exception)):
        kind = _kind_of_link(link)
        if kind is not End.EXCEPTION:
            return kind
    return End.EXCEPTION


def _name(exception: dict[str, Any]) -> str:
    """The exception's class, without its module."""
    return str(exception.get("type", "")).rpartition(".")[2]


def _kind_of_link(link: dict[str, Any]) -> End:
    text, file = _text(link), str(link.get("file", ""))
    if _TOLD.search(text):
        return End.TERMINATED
    dropped = "file" not in link and str(link.get("type")) in ("ConnectionResetError", "BrokenPipeError")
    if not (_COMMUNICATION.search(text) or dropped or "/torch/distributed/" in file):
        return End.EXCEPTION  # a user's own timeout or connection is a cause like any other
    if _PEER_LOST.search(text):
        return End.PEER_LOST
    return End.TIMED_OUT if _TIMEOUT.search(text) else End.EXCEPTION


def _chain(exception: dict[str, Any]) -> list[dict[str, Any]]:
    """What it was raised from; of recordings that do not say, what the traceback's text shows."""
    chain = exception.get("chain")
    if isinstance(chain, list):
        return [link for link in chain if isinstance(link, dict)]
    trace = exception.get("traceback")
    lines = [str(line) for line in trace] if isinstance(trace, list) else str(trace or "").splitlines()
    joints = [n for n, line in enumerate(lines) if line.startswith(_JOINTS)]
    ends = (next((line for line in reversed(lines[:n]) if line[:1].strip()), "") for n in joints)
    return [{"type": type_, "message": said} for type_, _, said in (end.partition(": ") for end in ends if end)]


def _text(exception: dict[str, Any]) -> str:
    return f"{exception.get('type', '')}: {exception.get('message', '')}"


def causes(found: dict[int, Ending], *, stalled: bool) -> list[Ending]:
    """The endings that explain the others, the earliest first; empty when no rank ended by itself.

    Several ranks may be causes (the same bug on all, a machine that went down). Ranks that somebody terminated are
    causes only where peers then lost them or wait for them, and nothing else explains that. `stalled`: whether those
    that are left have stopped moving.
    """
    own = sorted((e for e in found.values() if e.by_itself and e.timed), key=lambda e: (e.t_ns, e.rank))
    ended_by_hand = all(e.kind is End.DIED for e in own) and all_told(found)
    if own and not ended_by_hand and not (own[0].kind is End.DIED and _answers(own[0], found)):
        return [e for e in own if _is_cause_beside(e, own[0])]
    unseen = [e for e in found.values() if e.kind is End.DIED and not e.timed]
    if unseen and not all_told(found):
        return sorted(unseen, key=lambda e: e.rank)
    return _told_alone(found, stalled=stalled)


def all_told(found: dict[int, Ending]) -> bool:
    """Whether somebody outside told every rank that has ended to end, so that none of them is the others' cause."""
    over = [e for e in found.values() if e.over]
    first_ns = _first_told_ns(found)
    return any(e.told for e in over) and all(
        e.told or e.kind in (End.CLOSED, End.EXITED) or _finished_off(e, first_ns) for e in over
    )


def _told_alone(found: dict[int, Ending], *, stalled: bool) -> list[Ending]:
    """Ranks that somebody told to end and not the others, which then lost them or wait for them."""
    kinds = {e.kind for e in found.values()}
    told = [e for e in found.values() if e.kind in (End.TERMINATED, End.INTERRUPTED)]
    left = any(e.kind is End.OPEN and not e.told for e in found.values())
    missed = End.PEER_LOST in kinds or (stalled and left)
    if not told or not missed or End.TIMED_OUT in kinds or (all_told(found) and not left):
        return []
    if any(e.kind is End.OPEN and e.process is not None and e.process.stopped for e in found.values()):
        return []  # all were told, and a suspended process does not hear it
    told.sort(key=lambda e: (e.t_ns, e.rank))
    return [e for e in told if e.t_ns - told[0].t_ns < _TOLD_TOGETHER_NS]


def _answers(ending: Ending, found: dict[int, Ending]) -> bool:
    """Whether a rank that left with an exit code did so after another was told to end: it cleaned up and left."""
    code = ending.process.exit_code if ending.process is not None else None
    return code is not None and code > 0 and _first_told_ns(found) < ending.t_ns


def _first_told_ns(found: dict[int, Ending]) -> float:
    """When the first rank that was told to end did so."""
    return min((e.t_ns for e in found.values() if e.told and e.t_ns), default=math.inf)


def _finished_off(ending: Ending, first_told_ns: float) -> bool:
    """Whether a rank was killed long after another was told to end: who ends a job kills what does not hear it.

    A rank that waits inside a library does not hear a signal. The kernel's killing for memory is another matter.
    """
    process = ending.process
    if process is None or process.exit_code != -signals.SIGKILL or process.oom_killed or not process.ended_ns:
        return False
    return ending.t_ns - first_told_ns > TOGETHER_NS


def _is_cause_beside(ending: Ending, first: Ending) -> bool:
    """Whether `ending` is a cause of its own although `first` came before it."""
    if ending.kind is End.EXCEPTION or (ending.process is not None and ending.process.oom_killed):
        return True
    left = [e.process is not None and (e.process.exit_code or 0) > 0 for e in (first, ending)]
    if left == [False, True]:
        return False  # it saw that the first was gone, and left
    return first.kind is End.DIED and ending.t_ns - first.t_ns < TOGETHER_NS
