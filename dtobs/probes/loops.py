"""In which loops of the program training is: those around both a backward and a step of the optimizer.

A process that does nothing may hang, or be through with training and kept alive on purpose: it serves, or it waits for
a person. Where its stack is inside the loop that trains, training is not over (`detectors.hangs.no_progress`).

Looked at in steps 1, 2, 4, 8 and so on, as a program may train in several places. A loop of Python's own library around
them, such as that of a server, is where work comes from, and not looked beyond.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from dtobs.host.loops import loops_around
from dtobs.probes.base import Probe
from dtobs.probes.call_site import OURS, PYTHONS, USERS, whose

Loop = tuple[str, int, int]
"""A file, and the first and the last line of a loop in it."""


class TrainingLoops(Probe):
    """Writes each loop down once, as an entry ``loop``."""

    name = "loops"

    def __init__(self) -> None:
        super().__init__()
        self._steps = 0
        self._backward: set[Loop] = set()
        self._known: set[Loop] = set()

    def backward_begin(self, tensors: Any) -> None:
        """Before one of the steps that are looked at."""
        if self._looks():
            self._backward.update(self._loops(sys._getframe(1)))

    def after_optimizer(self) -> None:
        """The loops that were around a backward of this step, too; the innermost of them is where batches come by."""
        if self._looks():
            both = [loop for loop in self._loops(sys._getframe(1)) if loop in self._backward]
            for number, loop in enumerate(both):
                if loop not in self._known:
                    self._known.add(loop)
                    file, first, last = loop
                    self.context.recorder.meta.add("loop", file=file, first=first, last=last, inner=number == 0)
            self._backward.clear()
        self._steps += 1

    def _looks(self) -> bool:
        """Whether the number of the step to come, from 1, is a power of two."""
        return self._steps & (self._steps + 1) == 0

    def _loops(self, innermost: FrameType) -> list[Loop]:
        """The loops of the user's, or of a framework where it has the innermost, the innermost first."""
        found: list[Loop] = []
        frame: FrameType | None = innermost
        while frame is not None:
            code, file = frame.f_code, frame.f_code.co_filename
            owner = whose(file)
            if owner != OURS and (owner == USERS or not found):
                around = loops_around(code, frame.f_lasti)
                if around and owner == PYTHONS:
                    return found
                found += [(file, first, last) for first, last in around]
            frame = frame.f_back
        return found
