"""Rank: what one rank does, where its code stands and how it ended, at the moment of a RunView.

Every renderer, metric and detector takes these facts from here, so that one rank is described in one way everywhere.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dtobs.events import Kind, Phase, RankState, number_of, phase_name
from dtobs.host.process import signal_name
from dtobs.host.stacks import Crash, Frame, ThreadStack, main_thread, read_crash, training_thread
from dtobs.recording.meta import Group, Meta, Op, Site
from dtobs.recording.rundir import RunDirectory
from dtobs.recording.stepless import stepless

if TYPE_CHECKING:
    from dtobs.host.process import ProcessState
    from dtobs.recording.view import RunView

_UNKNOWN_CALL = "collective"
BRIEF_WAIT_SECONDS = 1.0
"""A shorter wait for other ranks is part of every step and not a state."""
_SILENT_SECONDS = 10.0
_SILENT_STEPS = 8
LONG_PHASES = (Phase.STARTUP, Phase.CHECKPOINT, Phase.VALIDATION, Phase.COMPILE)
TAIL_EVENTS = 64
END_SIGNALS = frozenset({signals.SIGTERM, signals.SIGINT, signals.SIGHUP})
"""Signals by which a launcher, a scheduler or a person tells a process to end."""
TERMINATION = frozenset(-number for number in END_SIGNALS)
"""Exit codes of a process that a launcher, a scheduler or a person ended."""


class State(StrEnum):
    """The state of a rank, with the word that every surface uses for it."""

    STARTING = "starting"  #: attached, no step seen yet
    RUNNING = "running"
    TAKING_PART = "taking part"  #: in the calls of others, without steps of its own: a parameter server, an actor
    LOADING = "loading"  #: in the part of the step that gets its data
    WAITING = "waiting"  #: blocked on communication with other ranks
    SILENT = "silent"  #: no sign of life for many of its own steps, and nothing says why
    SUSPENDED = "suspended"  #: stopped by a signal or a debugger
    FINISHED = "finished"  #: closed its session
    EXITED = "exited"  #: left with exit code 0 and without closing its session
    FAILED = "failed"  #: an exception left the training code
    INTERRUPTED = "interrupted"  #: from the keyboard, whether or not it closed its session on the way out
    TERMINATED = "terminated"  #: told to end by a launcher or a scheduler, whether or not it closed its session
    DEAD = "dead"  #: its process is gone by any other way
    UNREACHABLE = "out of reach"  #: its node no longer answers; what is known of it is from before
    UNKNOWN = "unknown"


ENDED = frozenset(
    {State.FINISHED, State.EXITED, State.FAILED, State.INTERRUPTED, State.TERMINATED, State.DEAD, State.UNKNOWN}
)
"""States in which a rank trains no more."""


@dataclass(frozen=True)
class LastCall:
    """A collective, a send or a receive that a rank issued. `peer` is -1 for a collective."""

    op: Op
    seq: int
    group: Group | None
    site: Site | None
    peer: int = -1

    def __str__(self) -> str:
        if self.peer >= 0:
            return f"{self.op.op} #{self.seq} {'to' if self.op.op == 'send' else 'from'} rank {self.peer}"
        # An unknown call has arguments, and nobody knows which.
        name = _UNKNOWN_CALL if self.op.op == _UNKNOWN_CALL else str(self.op)
        return f"{name} #{self.seq}{f' of {self.group}' if self.group is not None else ''}"

    @property
    def short(self) -> str:
        """Only its name, and the peer of a message: "all_reduce", "recv from rank 2"."""
        way = "to" if self.op.op == "send" else "from"
        return self.op.op if self.peer < 0 else f"{self.op.op} {way} rank {self.peer}"


@dataclass(frozen=True, eq=False)
class Rank:
    """One rank of `view`; made by ``view.rank(3)``. Durations are seconds, None where they do not apply."""

    view: RunView
    rank: int
    page: np.void

    def get(self, name: str) -> int:
        """One whole number of its page."""
        return int(self.page[name])

    @cached_property
    def meta(self) -> Meta:
        """What the numbers in its recording stand for."""
        return self.view.meta(self.rank)

    @cached_property
    def process(self) -> ProcessState | None:
        """What the kernel said of its process; None when nobody looked."""
        return self.view.process(self.rank)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.get("pid")

    @property
    def host(self) -> str:
        """The name of its host, "" when it did not say."""
        return str(self.meta.process.get("host", ""))

    @property
    def step(self) -> int:
        """The step it is in or did last; the one that began when the last was done is none where it has finished."""
        step = self.get("step")
        counted = self.state is State.FINISHED and not self.meta.process.get("steps_numbered")
        return min(step, self.get("steps_done")) if counted else step

    @property
    def place(self) -> dict[str, int]:
        """Its coordinates in the mesh; where it has a pipeline stage, that instead of the one along the pipeline."""
        layout = self.meta.layout
        found = {str(name): int(at) for name, at in layout.get("coordinates", {}).items() if isinstance(at, int)}
        stages = self.meta.pipeline.get("stages")
        if isinstance(stages, list) and stages and isinstance(stages[0], int):
            found = {"stage": stages[0]} | {name: at for name, at in found.items() if name not in ("pipeline", "pp")}
        return found

    @cached_property
    def state(self) -> State:
        """The one word for what it does or how it ended."""
        said = self.get("state")
        if said == RankState.CLOSED:
            return _TOLD.get(self.told, State.TERMINATED) if self.told else State.FINISHED
        if said == RankState.FAILED:
            kind = str((self.exception or {}).get("type", "")).rpartition(".")[2]
            return {"KeyboardInterrupt": State.INTERRUPTED, "SystemExit": State.EXITED}.get(kind, State.FAILED)
        if self.rank in self.view.out_of_reach:
            return State.UNREACHABLE
        process = self.process
        if process is not None and not process.alive:
            return _gone(process, self.told) if not self.ended_by_launcher else State.EXITED
        if process is not None and process.stopped:
            return State.SUSPENDED
        if (self.waited_seconds or 0.0) >= BRIEF_WAIT_SECONDS:
            return State.WAITING
        if self.get("phase") == Phase.DATA:
            return State.LOADING
        if said == RankState.STARTING:
            if self.stepless:
                return State.SILENT if (self.silent_seconds or 0.0) >= _SILENT_SECONDS else State.TAKING_PART
            return State.STARTING
        if said != RankState.RUNNING:
            return State.UNKNOWN
        return State.SILENT if self._too_quiet else State.RUNNING

    @cached_property
    def told(self) -> int:
        """The signal that told it to end and that reached its Python before it closed its session; 0 without one."""
        raised = [str(e.get("type", "")) for e in self.meta.exceptions if not e.get("thread")]
        heard = self.view.signals(self.rank) & END_SIGNALS
        if signals.SIGINT in heard or raised[-1:] == ["KeyboardInterrupt"]:
            return signals.SIGINT
        return min(heard, default=0)

    @property
    def _too_quiet(self) -> bool:
        if self.get("phase") in LONG_PHASES or not self.get("steps_done"):
            return False
        usual = max(self.get("step_ns"), self.get("phase_allowance_ns")) / 1e9
        return (self.silent_seconds or 0.0) >= max(_SILENT_SECONDS, _SILENT_STEPS * usual)

    @cached_property
    def moving(self) -> bool:
        """Whether its process may still do something: it has not ended and its node answers."""
        if self.get("state") in (RankState.CLOSED, RankState.FAILED) or self.rank in self.view.out_of_reach:
            return False
        return self.process is None or self.process.alive

    @property
    def stepless(self) -> bool:
        """Whether it takes part in the calls of others and takes no steps of its own."""
        return self.rank in stepless(self.view)

    @property
    def _attached_for_good(self) -> bool:
        return self.get("phase") == Phase.STARTUP and self.stepless

    @property
    def phase(self) -> str:
        """The name of the phase it is in, "" outside of any; the start-up of a rank without steps is over."""
        return "" if self._attached_for_good else phase_name(self.get("phase"), self.meta.phases)

    @property
    def phase_seconds(self) -> float | None:
        """How long it has been in its phase."""
        return (
            self.since("phase_begin_ns") if self.moving and self.get("phase") and not self._attached_for_good else None
        )

    @property
    def waited_seconds(self) -> float | None:
        """How long it has been blocked on communication with other ranks."""
        return self.since("wait_since_ns") if self.moving else None

    @property
    def silent_seconds(self) -> float | None:
        """How long ago it last published anything."""
        return self.since("heartbeat_ns") if self.moving else None

    def since(self, name: str) -> float | None:
        """Seconds since the time in one field of its page; None when that is not set."""
        then = self.get(name)
        return max(0, self.view.now_ns - then) / 1e9 if then else None

    @property
    def call(self) -> LastCall | None:
        """The last collective it issued."""
        seq, op = self.get("collective_seq"), self.get("collective_op")
        if not seq:
            return None
        return self._call(op, seq, self.get("collective_group"), self.get("collective_site"))

    @property
    def waits_in(self) -> LastCall | None:
        """The collective or the message it is blocked in; None when it is not blocked."""
        if not self.waited_seconds:
            return None
        wait, last = self.view.open_wait(self.rank), self.call
        if (
            wait is None
            or not wait["seq"]
            or (last is not None and wait["kind"] != Kind.P2P and last.seq == wait["seq"])
        ):
            return last
        peer = int(wait["value"]) if wait["kind"] == Kind.P2P else -1
        return self._call(int(wait["op"]), int(wait["seq"]), int(wait["group"]), int(wait["site"]), peer)

    def _call(self, op: int, seq: int, group: int, site: int, peer: int = -1) -> LastCall:
        meta = self.meta
        what = meta.ops.get(op) or Op(_UNKNOWN_CALL if peer < 0 else "message")
        return LastCall(what, number_of(seq), meta.groups.get(group), meta.sites.get(site), peer)

    @property
    def exception(self) -> dict[str, Any] | None:
        """The exception that ended it: the last of its main thread; those of other threads did not end it."""
        if self.get("state") != RankState.FAILED:
            return None
        raised = self.meta.exceptions
        main = [e for e in raised if not e.get("thread")] or raised
        return max(main, key=lambda e: int(e.get("t_ns") or 0)) if main else None

    @property
    def ending(self) -> str:
        """How it ended, in words: what it raised and how its process went; "" while it lives or nobody knows."""
        raised = self.exception
        words = [f"raised {raised.get('type', 'an exception')}"] if raised is not None else []
        process = self.process
        if process is not None and not process.alive and not (words and process.exit_code in (0, 1, None)):
            unseen = self.told and process.exit_code is None and not process.oom_killed
            words.append(f"told to end by {signal_name(self.told)}" if unseen else process.ending)
        return ", ".join(words)

    @cached_property
    def crash(self) -> Crash | None:
        """What it wrote when native code or ``os._exit`` ended it; None where that did not, or it wrote elsewhere."""
        process = self.process
        if process is None or process.alive or not process.exit_code:
            return None
        crash = read_crash(RunDirectory(self.view.root).stacks(self.rank, self.get("attempt")))
        return crash if crash is not None and process.exit_code == crash.exit_code else None

    @cached_property
    def stacks(self) -> list[ThreadStack]:
        """The stacks of all its threads when it crashed, else in the last capture; [] without one, or when it has
        moved on since.
        """
        if self.crash is not None:
            return self.crash.stacks
        capture = self.view.capture
        if capture is None or self.rank not in capture.ranks or self.get("heartbeat_ns") > capture.taken_ns:
            return []
        return capture.ranks[self.rank].stacks

    @cached_property
    def stack(self) -> ThreadStack | None:
        """The stack of the thread that ended it, else of the one that trains, when `stacks` were taken; or None."""
        if self.crash is not None and self.crash.stack is not None:
            return self.crash.stack
        ident, number = self.meta.process.get("training_thread"), self.training_thread
        aside = training_thread(self.stacks, ident, number) if isinstance(ident, int) else None
        return aside or main_thread(self.stacks)

    @property
    def training_thread(self) -> int:
        """The kernel's number of the thread that trains: that of the process, where it is the main one."""
        said = self.meta.process.get("training_thread_id")
        return said if isinstance(said, int) else self.pid

    @property
    def ended_by_launcher(self) -> bool:
        """Whether its process was told to end, or nobody saw how it did, when its training was over."""
        process = self.process
        if process is None or process.alive or process.oom_killed:
            return False
        return (process.exit_code is None or process.exit_code in TERMINATION) and self.dissolved

    @property
    def dissolved(self) -> bool:
        """Whether it destroyed all process groups between two steps, or the thread that trained has ended there, and it
        has done nothing since: its training is over.

        With launchers that keep their workers (Ray) that comes before they kill them.
        """
        said = (self.meta.process.get(name) for name in ("dissolved_ns", "thread_ended_ns"))
        since = max((at for at in said if isinstance(at, int)), default=-1)
        return self.get("heartbeat_ns") <= since and not self.meta.exceptions

    @property
    def user_frame(self) -> Frame | None:
        """The innermost line of the user's own code on its stack."""
        return self.stack.user_frame if self.stack is not None else None


def as_it_crashed(process: ProcessState, stacks: Path) -> ProcessState:
    """The same, and how it ended where nobody saw that and its file of `stacks` has it."""
    unseen = not process.alive and process.exit_code is None and not process.oom_killed
    crash = read_crash(stacks) if unseen else None
    return replace(process, exit_code=crash.exit_code) if crash is not None else process


_TOLD: dict[int, State] = {signals.SIGINT: State.INTERRUPTED}


def ending_signal(process: ProcessState, heard: Collection[int]) -> int:
    """The signal by which somebody told a process to end, and by which it ended; 0 where none did.

    Where nobody saw its exit code, it is one of those that its Python `heard`.
    """
    code = process.exit_code
    if process.oom_killed:
        return 0
    if code in (-signals.SIGINT, 128 + signals.SIGINT) or (code is None and signals.SIGINT in heard):
        return signals.SIGINT
    if code is None:
        return min(END_SIGNALS.intersection(heard), default=0)
    return -code if code in TERMINATION else 0


def _gone(process: ProcessState, told: int) -> State:
    number = ending_signal(process, {told})
    if number:
        return _TOLD.get(number, State.TERMINATED)
    return State.EXITED if process.exit_code == 0 else State.DEAD


def open_wait(events: npt.NDArray[np.void]) -> np.void | None:
    """The call that a rank waits for whose `events` end in a wait; the begin of the wait where the call is not held.

    None where no wait is open. A thread that makes calls while it waits waits for the last of them: DDP's broadcast of
    buffers issues its calls and waits for them in one.
    """
    kinds = events["kind"]
    waits = np.flatnonzero((kinds == Kind.WAIT_BEGIN) | (kinds == Kind.WAIT_END))
    if not len(waits) or kinds[waits[-1]] != Kind.WAIT_BEGIN:
        return None
    begin, calls = events[waits[-1]], np.isin(kinds, (Kind.P2P, Kind.COLLECTIVE))
    same = np.flatnonzero(calls & (events["group"] == begin["group"]) & (events["seq"] == begin["seq"]))
    same = same[same < waits[-1]]
    if not len(same):
        return begin  # type: ignore[no-any-return]
    within = np.flatnonzero(calls & (events["thread"] == events["thread"][same[-1]]))
    return events[max(same[-1], within[-1] if within[-1] > waits[-1] else 0)]  # type: ignore[no-any-return]
