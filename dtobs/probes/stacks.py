"""Stacks on request: a signal makes the process write all its Python stacks to a file, also while the GIL is held."""

from __future__ import annotations

import faulthandler
import os
import signal

from dtobs.probes.base import Context, Probe

STACKS_SIGNAL = signal.SIGRTMIN + 12
"""One that neither torch, NCCL, profilers nor debuggers use."""


class Stacks(Probe):
    """Registers faulthandler for `STACKS_SIGNAL`; the monitor sends it and reads the file."""

    name = "stacks"
    about_model = False

    def install(self, context: Context) -> None:
        recorder = context.recorder
        path = recorder.run_dir.stacks(recorder.rank, recorder.attempt)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        faulthandler.register(STACKS_SIGNAL, file=self._fd, all_threads=True, chain=False)
        recorder.meta.add("process", stacks_file=str(path), stacks_signal=int(STACKS_SIGNAL))

    def remove(self) -> None:
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            faulthandler.unregister(STACKS_SIGNAL)
            os.close(fd)
