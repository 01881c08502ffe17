"""Small real processes for the monitor to look at: each says "ready" and then does what it is told."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

PRELUDE = "import sys, os, time, signal\n"


@contextlib.contextmanager
def child(code: str, *arguments: object, interpreter: str = sys.executable) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process that has printed a line, with a pipe to its stdin; killed on leaving, with what it started."""
    process = subprocess.Popen(
        [interpreter, "-c", PRELUDE + code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.strip() == b"ready", line
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


WAIT = "print('ready', flush=True); sys.stdin.read()\n"
"""Ends with code 0 when its stdin is closed."""
