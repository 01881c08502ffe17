"""The command that `dtobs prove` and `dtobs replay` run leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dtobs.cli import _observed
from dtobs.host.process import read_process

LAUNCHER = """
import signal, subprocess, sys
rank = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(300)"
child = subprocess.Popen([sys.executable, "-c", rank], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


def test_a_rank_in_its_own_session_that_ignores_sigterm_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_observed, "_GRACE_SECONDS", 0.2)
    words = [sys.executable, "-c", LAUNCHER]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True) as launcher:
        assert launcher.stdout is not None
        said = {launcher.stdout.readline().strip(), launcher.stdout.readline().strip()}
        rank = int(next(iter(said - {"ready"})))
        assert read_process(rank).alive
        _observed._end(launcher)
    assert launcher.returncode is not None
    while read_process(rank).alive:  # what was killed is gone a moment later; the test's deadline bounds it
        os.sched_yield()
