"""Stacks on request: a signal makes the process write all its Python stacks to a file, also while the GIL is held."""

from __future__ import annotations

import faulthandler
import os
import signal

from dtobs.probes.base import Probe

STACKS_SIGNAL = signal.SIGRTMIN + 12
"""One that neither torch, NCCL, profilers nor debuggers use."""
LOOK_SIGNAL = STACKS_SIGNAL + 1
"""Asks a worker process that is at work for its own stack: `host.own_stack` answers it."""
FOR_WORKERS = "DTOBS_STACKS"
"""The variable that tells a rank's workers the signal and the rank's file, below ``dtobs run``."""


class Stacks(Probe):
    """Registers faulthandler for `STACKS_SIGNAL`; the monitor sends it and reads the file."""

    name = "stacks"
    about_model = False

    def install(self) -> None:
        recorder = self.context.recorder
        path = recorder.run_dir.stacks(recorder.rank, recorder.attempt)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.undo.callback(os.close, file)
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True, chain=False)
        self.undo.callback(faulthandler.unregister, STACKS_SIGNAL)
        if os.environ.get("DTOBS_RUN_NAME"):  # workers that are started anew find it: `integrations.startup`
            os.environ[FOR_WORKERS] = f"{int(STACKS_SIGNAL)}:{path.absolute()}"
            self.undo.callback(os.environ.pop, FOR_WORKERS, None)
        recorder.meta.add("process", stacks_file=str(path), stacks_signal=int(STACKS_SIGNAL))
