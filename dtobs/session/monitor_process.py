"""Starts the node's monitor: a process of its own that outlives this one and never holds it up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import dtobs
from dtobs.host.process import with_path
from dtobs.recording.rundir import RunDirectory
from dtobs.session.nodes import Listening

_HERE = Path(dtobs.__file__).resolve().parents[1]
"""From where this process has dtobs: so has the monitor."""


class MonitorProcess:
    """The monitor as its parent sees it. It ends by itself when the node's ranks are gone."""

    def __init__(self, run: RunDirectory, node: int, listening: Listening | None = None, on_hang: str = "") -> None:
        """Start it, on loopback without `listening`. Raises OSError when that is impossible."""
        log = run.node(node) / "monitor.log"
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = listening.socket if listening is not None else None
        where = ["--listen", listening.argument] if listening is not None else []
        policy = ["--on-hang", on_hang] if on_hang else []
        if made is not None:
            where += ["--socket", str(made.fileno())]
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dtobs.monitor", str(run.root), "--node", str(node), *where, *policy],
                stdin=subprocess.DEVNULL,
                stdout=fd,
                stderr=fd,
                cwd="/",
                env=with_path(os.environ, _HERE) | {"PYTHONSAFEPATH": "1"},
                start_new_session=True,  # a Ctrl-C or a kill of the job's process group is not for it
                pass_fds=[made.fileno()] if made is not None else [],
            )
        finally:
            os.close(fd)
            if made is not None:
                made.close()  # it is the monitor's alone
        self.pid = self._process.pid

    def wake(self) -> bool:
        """Ask it for a pass now; whether it lives. A monitor that still starts ignores the signal, as any program."""
        if self._process.poll() is not None:
            return False
        self._process.send_signal(signal.SIGURG)
        return True

    def let_go(self) -> None:
        """Forget it without waiting."""
        if self._process.poll() is None:
            # Popen warns when it is deleted before its process has ended; this one is meant to live on.
            self._process.returncode = 0
