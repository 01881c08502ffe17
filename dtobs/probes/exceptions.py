"""Exceptions that leave the training code: recorded before Python prints them and exits."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from dtobs.events import Kind, RankState, identify, phase_name
from dtobs.probes.base import Probe
from dtobs.probes.call_site import OURS, PYTHONS, whose
from dtobs.words import middle_out, without_escapes

MAX_MESSAGE = 2000
MAX_LINES = 60
MAX_CHAIN = 8
MAX_LINK = 500
_QUOTED = "Traceback (most recent call last):"
_OF_RANK = re.compile(r"\(RANK (\d+)\)")
MAX_SIGNALS = 64


class _Leaving(NamedTuple):
    """A call of ``sys.exit``: in which step, because of which error, and what is to be written of that."""

    step: int
    error: int
    said: dict[str, Any]
    failed: bool


class Exceptions(Probe):
    """Chains ``sys.excepthook`` and ``threading.excepthook``; the ones that were there run as before.

    A program that handles what ended its training and leaves by ``sys.exit(1)`` or ``os._exit(1)`` failed all the same.
    Another exit code is the program's own word for how it ended (to be queued again, for one): it is written down as
    that, with the error.
    """

    name = "exceptions"
    about_model = False

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[int] = set()
        self._leaving: _Leaving | None = None
        self._left_at: tuple[int, dict[str, Any] | None] | None = None  # the step and line of ``sys.exit(0)``
        self.saw: Callable[[BaseException], object] = _ignore

    def install(self) -> None:
        self.saw = self.guard(self.record)
        self.around(sys, "excepthook", lambda _kind, error, _trace: self.record(error), _ignore)
        self.around(threading, "excepthook", self._of_thread, _ignore)
        self.around(sys, "exit", self._leave, _ignore)
        self.around(os, "_exit", self._leave_at_once, _ignore)

    def _of_thread(self, args: Any) -> None:
        if args.exc_value is not None:
            self.record(args.exc_value, thread=args.thread.name if args.thread else "")

    def record(self, error: BaseException, thread: str = "") -> None:
        """Write the exception down, once. An interrupt or an exit with a code is no failure, and is written as well."""
        orderly = isinstance(error, SystemExit) and error.code in (None, 0)
        if orderly or isinstance(error, GeneratorExit) or id(error) in self._seen:
            return
        self._seen.add(id(error))
        self._write(self._described(error) | {"thread": thread}, _fails(error) and not thread)

    def _leave(self, code: object = None) -> None:
        """``sys.exit`` is called; whether the program does leave is known when the interpreter ends (`left`)."""
        if _says_failure(code) and not self._leaves_already(code):
            error = sys.exc_info()[1] or SystemExit(code)
            said, failed = self._described(error), _fails(error)
            if error.__traceback__ is None:  # nothing is raised yet
                said["frame"] = self._frame_here()
            if isinstance(code, int):
                said["exit_code"] = code
                if failed and code != 1:
                    failed, why = False, f"{said['type'].rpartition('.')[2]}: {said['message']}"
                    said |= {"type": "SystemExit", "message": why}
            self._leaving = _Leaving(self.context.step, id(error), said, failed)
        elif code in (None, 0) and threading.current_thread() is threading.main_thread():
            self._left_at = (self.context.step, self._frame_here())

    def _leaves_already(self, code: object) -> bool:
        """Whether `code` only says again why the program leaves, as multiprocessing does from Python 3.13 on."""
        before = self._leaving if sys.exc_info()[1] is None else None
        return before is not None and (before.step, before.said.get("exit_code")) == (self.context.step, code)

    def _leave_at_once(self, code: object = None) -> None:
        error = sys.exc_info()[1]
        if error is not None and _says_failure(code) and not self._told_to_end():
            self.record(error)
        elif code in (None, 0) and threading.current_thread() is threading.main_thread():
            caller: FrameType | None = sys._getframe(1)
            while caller is not None and whose(caller.f_code.co_filename) == OURS:
                caller = caller.f_back
            # A process that multiprocessing forked ends by it as well.
            if caller is not None and whose(caller.f_code.co_filename) < PYTHONS:
                left_at = {**_line(caller, caller.f_lineno), "by": "os._exit"}
                self.context.recorder.meta.add("process", left_at=left_at)

    def left(self) -> None:
        """The interpreter ends: write down the error with which it does, in a child of multiprocessing as well."""
        flying, leaving = sys.exc_info()[1], self._leaving
        if flying is not None and not isinstance(flying, SystemExit):
            self.record(flying)
            return
        if self._left_at is not None and self._left_at[0] == self.context.step:
            self.context.recorder.meta.add("process", left_at=self._left_at[1])
        if leaving is None or leaving.step != self.context.step or leaving.error in self._seen or self._told_to_end():
            return
        self._write(leaving.said, leaving.failed)

    def _told_to_end(self) -> bool:
        """Whether a signal that asks it to end has reached this process, so that it leaves for that reason."""
        recorder = self.context.recorder
        try:
            heard = recorder.run_dir.signals(recorder.rank, recorder.attempt).read_bytes()
        except OSError:
            return False
        return bool({signal.SIGTERM, signal.SIGINT, signal.SIGHUP} & set(heard))

    def _described(self, error: BaseException) -> dict[str, Any]:
        context, kind = self.context, type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        lines = without_escapes("".join(traceback.format_exception(error))).splitlines()
        return {
            "id": identify(f"{name}|{error}"),
            "type": name,
            "message": middle_out(without_frames(without_escapes(str(error))), MAX_MESSAGE),
            "traceback": lines[-MAX_LINES:],
            "chain": _chain(error),
            "t_ns": time.monotonic_ns(),
            "step": context.step,
            "phase": phase_name(context.phase) or "none",
            "frame": self._user_frame(error.__traceback__),
            "thread": "",
        }

    def _write(self, said: dict[str, Any], failed: bool) -> None:
        context = self.context
        context.recorder.meta.add("exception", **said)
        context.recorder.events.write(Kind.ERROR, context.phase, context.step, 0, 0, said["id"])
        if failed:  # a thread that dies leaves the training running
            context.recorder.page.set(state=RankState.FAILED)
        context.recorder.page.commit()

    def _user_frame(self, trace: TracebackType | None) -> dict[str, Any] | None:
        """The innermost line of the user's own code on the way to the exception."""
        found: tuple[FrameType, int] | None = None
        while trace is not None:
            if found is None or whose(trace.tb_frame.f_code.co_filename) < PYTHONS:
                found = (trace.tb_frame, trace.tb_lineno)
            trace = trace.tb_next
        return _line(*found) if found is not None else None

    def _frame_here(self) -> dict[str, Any] | None:
        """The innermost line of the user's own code that led here."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and whose(frame.f_code.co_filename) >= PYTHONS:
            frame = frame.f_back
        return _line(frame, frame.f_lineno) if frame is not None else None


class Signals(Probe):
    """Writes the number of every signal that Python handles to a file, from the C handler.

    It does so while the main thread is inside native code too, so that a rank which lost its peers because all were
    told to end can be told from one whose peer alone was. Where somebody else (asyncio) wants the one such descriptor
    that a process can have, it is theirs.
    """

    name = "signals"
    about_model = False
    _fd = -1

    def install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        recorder = self.context.recorder
        path = recorder.run_dir.signals(recorder.rank, recorder.attempt)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):
            os.posix_fallocate(fd, 0, MAX_SIGNALS)  # a disk that fills up later has room for these
        before = signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            os.close(fd)
            return
        self._fd = fd

    def abandon(self) -> None:
        super().abandon()
        self.remove()  # what a data-loader worker is told is not told to the rank

    def remove(self) -> None:
        fd, self._fd = self._fd, -1
        if fd < 0 or threading.current_thread() is not threading.main_thread():
            return  # the descriptor stays open: the handler may still write to it
        mine = signal.set_wakeup_fd(-1)
        if mine != fd:
            signal.set_wakeup_fd(mine)
        os.close(fd)


def _line(frame: FrameType, line: int) -> dict[str, Any]:
    return {"file": frame.f_code.co_filename, "line": line, "function": frame.f_code.co_qualname}


def _fails(error: BaseException) -> bool:
    return not isinstance(error, KeyboardInterrupt | SystemExit)


def _says_failure(code: object) -> bool:
    """Whether the main thread leaves with this exit code, or message, because something failed."""
    return code not in (None, 0) and threading.current_thread() is threading.main_thread()


def without_frames(message: str) -> str:
    """A message without the lines of code of the tracebacks that it quotes, as those of other ranks or processes.

    What was raised stands at their end, where a message that is cut off has it no more.
    """
    if _QUOTED not in message:
        return message
    said, of = [], ""
    for line in message.splitlines():
        if _QUOTED in line:
            rank = _OF_RANK.search(line)
            of = f"rank {rank[1]}: " if rank is not None else ""
        elif line.strip() and not line.startswith(" "):
            said.append(of + line)
            of = ""
    return "\n".join(said)


def _chain(error: BaseException) -> list[dict[str, str]]:
    """The exceptions that `error` was raised from ("cause") or while handling ("context"), the nearest first."""
    found: list[dict[str, str]] = []
    seen, link = {id(error)}, error
    while len(found) < MAX_CHAIN:
        explicit = link.__cause__
        before = explicit or (None if link.__suppress_context__ else link.__context__)
        if before is None or id(before) in seen:
            break
        seen.add(id(before))
        link, trace = before, before.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        file = trace.tb_frame.f_code.co_filename if trace is not None else ""
        kind = type(link)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        how = "cause" if before is explicit else "context"
        found.append({"type": name, "message": without_escapes(str(link))[:MAX_LINK], "file": file, "how": how})
    return found


def _ignore(_: object) -> None:
    """Before the probe is installed, and after the hooks that were there have run."""
