"""When torch compiles: that time is a part of its step, in whatever phase it is spent.

Private torch: ``torch._dynamo.callback``, which tells of a frame that is compiled and of a backward pass that is
compiled when it first runs; tried with 2.13. Where it is not there, the time stays that of the phase.
"""

from __future__ import annotations

import sys
from typing import Any

from dtobs.probes.base import Probe

_MODULE = "torch._dynamo.callback"


class Compilations(Probe):
    """Listens once the compiler has been imported, which whoever makes an optimizer does; never imports it."""

    name = "compilations"

    def install(self) -> None:
        """Listen, if the compiler is there."""
        # A capture must not keep the end of what it began unsaid.
        self._begin = self.guard(lambda _: self.context.progress.compile_begin(), always=True)
        self._end = self.guard(lambda _: self.context.progress.compile_end(), always=True)
        self.step_begin()

    def step_begin(self) -> None:
        """Listen, if the compiler has come since, or was reset: that makes it forget who listens."""
        handler: Any = getattr(sys.modules.get(_MODULE), "callback_handler", None)
        for calls, ours in _both(handler, self._begin, self._end):
            if ours not in calls:
                calls.append(ours)

    def remove(self) -> None:
        """Listen no more."""
        handler: Any = getattr(sys.modules.get(_MODULE), "callback_handler", None)
        for calls, ours in _both(handler, self._begin, self._end):
            if ours in calls:
                calls.remove(ours)
        super().remove()


def _both(handler: Any, begin: Any, end: Any) -> tuple[tuple[list[Any], Any], ...]:
    """What the compiler calls when it begins and when it is done, each with ours; () where it is another compiler."""
    starts, ends = getattr(handler, "start_callbacks", None), getattr(handler, "end_callbacks", None)
    return ((starts, begin), (ends, end)) if isinstance(starts, list) and isinstance(ends, list) else ()
