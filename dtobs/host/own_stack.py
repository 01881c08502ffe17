"""A process prints the stack of its main thread when a signal asks it to, between two instructions of Python.

faulthandler prints at once, also where Python's lock is held for ever, but it reads what other threads change
meanwhile (cpython#116008): of the workers of a DataLoader, which have a second thread, one signal in some thousands
ended one. That is nothing to ask of a process that is at work.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

MOST_FRAMES = 256


def print_when_asked(number: int, path: str) -> None:
    """Handle signal `number` from now on: append the stack to the file `path`, in the form of faulthandler.

    System calls that it interrupts go on. Raises ValueError outside the main thread.
    """

    def answer(_number: int, frame: FrameType | None) -> None:
        lines = [f"Current thread 0x{threading.get_ident():016x} (most recent call first):"]
        while frame is not None and len(lines) <= MOST_FRAMES:
            lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
            frame = frame.f_back
        try:
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError:
            return  # the run directory is gone, and with it who asked
        try:
            os.write(file, "\n".join([*lines, ""]).encode(errors="replace"))
        except OSError:
            pass  # a full disk
        finally:
            os.close(file)

    signal.signal(number, answer)
    signal.siginterrupt(number, False)
