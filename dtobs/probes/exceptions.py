"""Exceptions that leave the training code: recorded before Python prints them and exits."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from dtobs.events import Kind, RankState, identify, phase_name
from dtobs.probes.base import Probe
from dtobs.probes.call_site import CallSites

MAX_MESSAGE = 2000
MAX_LINES = 60
MAX_CHAIN = 8
MAX_LINK = 500
MAX_SIGNALS = 64


class Exceptions(Probe):
    """Chains ``sys.excepthook`` and ``threading.excepthook``; the ones that were there run as before."""

    name = "exceptions"
    about_model = False

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[int] = set()
        self.saw: Callable[[BaseException], object] = _ignore

    def install(self) -> None:
        self._sites = CallSites(self.context.recorder.meta)
        self.saw = self.guard(self.record)
        self.around(sys, "excepthook", lambda _kind, error, _trace: self.record(error), _ignore)
        self.around(threading, "excepthook", self._of_thread, _ignore)

    def _of_thread(self, args: Any) -> None:
        if args.exc_value is not None:
            self.record(args.exc_value, thread=args.thread.name if args.thread else "")

    def record(self, error: BaseException, thread: str = "") -> None:
        """Write the exception down, once. An interrupt or an exit with a code is no failure, and is written as well."""
        orderly = isinstance(error, SystemExit) and error.code in (None, 0)
        if orderly or isinstance(error, GeneratorExit) or id(error) in self._seen:
            return
        self._seen.add(id(error))
        failed = not isinstance(error, KeyboardInterrupt | SystemExit)
        context = self.context
        recorder = context.recorder
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        lines = "".join(traceback.format_exception(error)).splitlines()
        number = identify(f"{name}|{error}")
        recorder.meta.add(
            "exception",
            id=number,
            type=name,
            message=str(error)[:MAX_MESSAGE],
            traceback=lines[-MAX_LINES:],
            chain=_chain(error),
            t_ns=time.monotonic_ns(),
            step=context.step,
            phase=phase_name(context.phase) or "none",
            frame=self._user_frame(error.__traceback__),
            thread=thread,
        )
        recorder.events.write(Kind.ERROR, context.phase, context.step, 0, 0, number)
        if failed and not thread:  # a thread that dies leaves the training running
            recorder.page.set(state=RankState.FAILED)
        recorder.page.commit()

    def _user_frame(self, trace: TracebackType | None) -> dict[str, Any] | None:
        """The innermost line of the user's own code on the way to the exception."""
        found: tuple[FrameType, int] | None = None
        while trace is not None:
            if found is None or not self._sites.is_library(trace.tb_frame.f_code.co_filename):
                found = (trace.tb_frame, trace.tb_lineno)
            trace = trace.tb_next
        if found is None:
            return None
        code = found[0].f_code
        return {"file": code.co_filename, "line": found[1], "function": code.co_qualname}


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
        self.remove()  # what a data-loader worker is told is not told to the rank

    def remove(self) -> None:
        fd, self._fd = self._fd, -1
        if fd < 0 or threading.current_thread() is not threading.main_thread():
            return  # the descriptor stays open: the handler may still write to it
        mine = signal.set_wakeup_fd(-1)
        if mine != fd:
            signal.set_wakeup_fd(mine)
        os.close(fd)


def _chain(error: BaseException) -> list[dict[str, str]]:
    """The exceptions that `error` was raised from or while handling, the nearest first."""
    found: list[dict[str, str]] = []
    seen, link = {id(error)}, error
    while len(found) < MAX_CHAIN:
        before = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
        if before is None or id(before) in seen:
            break
        seen.add(id(before))
        link, trace = before, before.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        file = trace.tb_frame.f_code.co_filename if trace is not None else ""
        kind = type(link)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        found.append({"type": name, "message": str(link)[:MAX_LINK], "file": file})
    return found


def _ignore(_: object) -> None:
    """Before the probe is installed, and after the hooks that were there have run."""
