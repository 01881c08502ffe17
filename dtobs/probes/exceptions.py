"""Exceptions that leave the training code: recorded before Python prints them and exits."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from dtobs.events import PHASE_BY_NAME, Kind, RankState, identify
from dtobs.probes.base import Context, Probe
from dtobs.probes.call_site import CallSites

_PHASE_NAMES = {int(phase): name for name, phase in PHASE_BY_NAME.items()}
MAX_MESSAGE = 2000
MAX_LINES = 60


class Exceptions(Probe):
    """Chains ``sys.excepthook`` and ``threading.excepthook``; the ones that were there run as before."""

    name = "exceptions"
    about_model = False

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[int] = set()
        self._hooks: tuple[Any, Any] | None = None
        self.saw: Callable[[BaseException], object] = _ignore

    def install(self, context: Context) -> None:
        self._context = context
        self._sites = CallSites(context.recorder.meta)
        before, before_thread = sys.excepthook, threading.excepthook
        record = context.guard(self, self.record)

        def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            record(error)
            before(kind, error, trace)

        def thread_excepthook(args: Any) -> None:
            if args.exc_value is not None:
                record(args.exc_value, thread=args.thread.name if args.thread else "")
            before_thread(args)

        self.saw = record
        self._before = (before, before_thread)
        self._hooks = (excepthook, thread_excepthook)
        sys.excepthook, threading.excepthook = excepthook, thread_excepthook

    def remove(self) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is None:
            return
        if sys.excepthook is hooks[0]:
            sys.excepthook = self._before[0]
        if threading.excepthook is hooks[1]:
            threading.excepthook = self._before[1]

    def record(self, error: BaseException, thread: str = "") -> None:
        """Write the exception down, once. An interrupt or an orderly exit is none."""
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit) or id(error) in self._seen:
            return
        self._seen.add(id(error))
        context = self._context
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
            t_ns=time.monotonic_ns(),
            step=context.step,
            phase=_PHASE_NAMES.get(context.phase, str(context.phase)),
            frame=self._user_frame(error.__traceback__),
            thread=thread,
        )
        recorder.events.write(Kind.ERROR, context.phase, context.step, 0, 0, number)
        if not thread:  # a thread that dies leaves the training running
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


def _ignore(error: BaseException) -> None:
    """Before the probe is installed, and where it is switched off."""
