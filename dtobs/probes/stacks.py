"""Stacks on request: a signal makes the process write its Python stacks to a file, also while the GIL is held.

faulthandler writes them, and reads those of other threads as they are: where one of these runs Python code, with a deep
stack, one such signal in some twenty ended the process (cpython#116008). So all threads are asked for only where the
GIL is held, and nobody else runs; else the main thread alone, whose stack stands still while it handles the signal.

Unless the program has switched faulthandler on for itself, it also writes there where all threads stood when native
code crashed the process: what PYTHONFAULTHANDLER=1 prints. The same is written when ``os._exit`` ends it with an error.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from typing import Any

from dtobs.host.stacks import LEAVING
from dtobs.probes import patches
from dtobs.probes.base import Probe

STACKS_SIGNAL = signal.SIGRTMIN + 12
"""All threads, of a process whose GIL is held. Neither torch, NCCL, profilers nor debuggers use it or the next two."""
MAIN_SIGNAL = STACKS_SIGNAL + 1
"""The main thread alone, of a process that may be at work, or a worker of it."""
LOOK_SIGNAL = STACKS_SIGNAL + 2
"""Asks a worker process that is at work for its own stack: `host.own_stack` answers it."""
FOR_WORKERS = "DTOBS_STACKS"
"""The variable that tells a rank's workers the signal and the rank's file, below ``dtobs run``."""


class Stacks(Probe):
    """Registers faulthandler for the two signals, one of which the monitor sends, and for crashes."""

    name = "stacks"
    about_model = False
    _for_crashes = False  # faulthandler is on for our file

    def install(self) -> None:
        recorder = self.context.recorder
        path = recorder.run_dir.stacks(recorder.rank, recorder.attempt)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.undo.callback(os.close, file)
        for number in (STACKS_SIGNAL, MAIN_SIGNAL):
            faulthandler.register(number, file=file, all_threads=number == STACKS_SIGNAL, chain=False)
            self.undo.callback(faulthandler.unregister, number)
        if not faulthandler.is_enabled():
            faulthandler.enable(file=file)
            self._for_crashes = True
            self.undo.callback(self._let_go)
            self.undo.callback(patches.around(faulthandler, "enable", self.guard(self._taken), lambda _: None))
        self.around(os, "_exit", lambda code=0, **named: _leaves(file, named.get("status", code)), lambda _: None)
        if os.environ.get("DTOBS_RUN_NAME"):  # workers that are started anew find it: `integrations.startup`
            os.environ[FOR_WORKERS] = f"{int(MAIN_SIGNAL)}:{path.absolute()}"
            self.undo.callback(os.environ.pop, FOR_WORKERS, None)
        recorder.meta.add(
            "process", stacks_file=str(path), stacks_signal=int(STACKS_SIGNAL), main_signal=int(MAIN_SIGNAL)
        )

    def _taken(self, *args: Any, **kwargs: Any) -> None:
        """The program switches faulthandler on for itself: what it writes of a crash is the program's from now on."""
        self._for_crashes = False

    def _let_go(self) -> None:
        if self._for_crashes:
            self._for_crashes = False
            faulthandler.disable()

    def abandon(self) -> None:
        super().abandon()
        self._let_go()  # a child that crashes says nothing in the file of its parent


def _leaves(file: int, code: int) -> None:
    """Nobody else says where the program leaves in this way, nor with which code where its launcher is first to ask."""
    if code:
        os.write(file, f"{LEAVING}{code & 0xFF}\n".encode())
        faulthandler.dump_traceback(file)
