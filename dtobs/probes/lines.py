"""Looks at the stack of the thread that trains for some seconds, when the monitor asks where a rank spends its time.

A thread of its own looks, `LOOKS` times at uneven intervals, and needs the Python lock for some ten microseconds each
time. The rank is not interrupted, as by a signal, and nothing is needed that a container may forbid, as by a debugger.
Where it waits for a worker process of its data loader, that one is asked for its stack by a signal, and its lines count
as called by the rank's.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

from dtobs.host.loader_workers import worker_frames
from dtobs.host.stacks import in_library
from dtobs.probes.stacks import LOOK_SIGNAL
from dtobs.recording.lines import LOOKS, Lines, LinesRequest, StackLook, counted

_MOST_FRAMES = 256
_WORKER_SECONDS = 1.0
_TORCH = f"{Path(torch.__file__).parent}/"
_FRAMEWORK = ("/dtobs/probes/", "/dtobs/session/", "/dtobs/recording/", "/dtobs/integrations/")
_INSTALLED = ("/site-packages/", "/dist-packages/")


class StackLooks(threading.Thread):
    """Looks at the thread that makes it, until `stop`; `found` is there when all looks are done.

    `awaited` is `Context.waits_for_data`; into the file `stacks` the rank, and what it forks, print their stacks.
    """

    def __init__(self, request: LinesRequest, step: int, awaited: Callable[[], int | None], stacks: Path) -> None:
        super().__init__(name="dtobs-lines", daemon=True)
        self._awaited, self._stacks = awaited, stacks
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
        looks = []
        for _ in range(LOOKS):
            if self._stopped.wait(pause * uneven.uniform(0.4, 1.6)):
                return
            if self._thread in (frames := sys._current_frames()):
                lines, worker = told_lines(frames[self._thread]), self._awaited()
                del frames  # nothing of the loop's is held while a worker is asked
                looks.append(StackLook([*(self._of_worker(worker) if worker else ()), *lines], worker is not None))
        self.found = counted(self.request, self._step, looks)

    def _of_worker(self, worker: int) -> list[str]:
        frames = worker_frames(worker, LOOK_SIGNAL, self._stacks, _WORKER_SECONDS)
        return [str(frame) for frame in frames if _is_told(frame.file)] or [str(frame) for frame in frames[:1]]


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
