"""Looks at the stack of the thread that trains for some seconds, when the monitor asks where a rank spends its time.

A thread of its own looks, `LOOKS` times at uneven intervals, and needs the Python lock for some ten microseconds each
time. Nobody is interrupted, as by a signal, and nothing is needed that a container may forbid, as by a debugger.
"""

from __future__ import annotations

import random
import sys
import threading
from pathlib import Path
from types import FrameType

import torch

from dtobs.host.stacks import in_library
from dtobs.recording.lines import LOOKS, Lines, LinesRequest, counted

_MOST_FRAMES = 256
_TORCH = f"{Path(torch.__file__).parent}/"
_FRAMEWORK = ("/dtobs/probes/", "/dtobs/session/", "/dtobs/recording/", "/dtobs/integrations/")
_INSTALLED = ("/site-packages/", "/dist-packages/")


class StackLooks(threading.Thread):
    """Looks at the thread that makes it, until `stop`; `found` is there when all looks are done."""

    def __init__(self, request: LinesRequest, step: int) -> None:
        super().__init__(name="dtobs-lines", daemon=True)
        self.request, self._step = request, step
        self.found: Lines | None = None
        self._thread = threading.get_ident()
        self._stopped = threading.Event()

    def stop(self) -> None:
        """No further look."""
        self._stopped.set()

    def run(self) -> None:
        """Look; what was seen is in `found` then."""
        pause, uneven = self.request.seconds / LOOKS, random.Random()
        stacks = []
        for _ in range(LOOKS):
            if self._stopped.wait(pause * uneven.uniform(0.4, 1.6)):
                return
            frame = sys._current_frames().get(self._thread)
            if frame is not None:
                stacks.append(told_lines(frame))
        self.found = counted(self.request, self._step, stacks)


def told_lines(frame: FrameType | None) -> list[str]:
    """The lines of a stack that are neither torch's nor Python's own, the innermost first."""
    lines: list[str] = []
    seen = 0
    while frame is not None and seen < _MOST_FRAMES:
        code = frame.f_code
        if _is_told(code.co_filename):
            lines.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")
        frame, seen = frame.f_back, seen + 1
    return lines


def _is_told(file: str) -> bool:
    if file.startswith(_TORCH) or any(part in file for part in _FRAMEWORK):
        return False
    return any(part in file for part in _INSTALLED) or not in_library(file)
