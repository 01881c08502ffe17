"""A run ends with one line of what was found, stood still and was lost, or that nothing was."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from threading import Timer
from types import SimpleNamespace

import pytest

from dtobs.findings import Finding
from dtobs.monitor.address import announce, looked, withdraw
from dtobs.monitor.journal import Journal
from dtobs.monitor.lock import NodeLock
from dtobs.recording.rundir import RunDirectory
from dtobs.recording.watched import LastPass
from dtobs.session.last_word import await_last_pass, last_word
from dtobs.session.start import _timeout

STOPPED = Finding("rank-stopped", "rank 1 is suspended", (1,), since_ns=10**9)


@pytest.fixture(autouse=True)
def run_json(tmp_path: Path) -> None:
    RunDirectory(tmp_path).write_run({})


def test_nothing_found(tmp_path: Path):
    assert last_word(tmp_path, 0, 300, failed=False) == "nothing found in 300 steps"


def test_found_and_stood_still(tmp_path: Path):
    journal = Journal(RunDirectory(tmp_path).findings)
    journal.update([STOPPED], 31 * 10**9, may_clear=True)
    for second in (32, 33):
        journal.update([Finding("data-overlap", "same", (0, 1))], second * 10**9, may_clear=True)
    said = last_word(tmp_path, 0, 9, failed=False)
    assert said == f"found data-overlap, stood still for 30 s; more with: dtobs diagnose {tmp_path}"
    assert "ended by an exception" in last_word(tmp_path, 0, 9, failed=True)


def test_nothing_is_found_by_a_monitor_that_was_killed(tmp_path: Path):
    run = RunDirectory(tmp_path)
    lock = NodeLock(run.monitor_lock(0))
    assert lock.acquire()
    announce(run, 0, None)
    assert last_word(tmp_path, 0, 9, failed=False) == "nothing found in 9 steps"
    lock.release()  # as the kernel does
    said = last_word(tmp_path, 0, 9, failed=False)
    assert said.startswith("its monitor was killed, so that nobody looked for hangs and findings until the end; more")
    withdraw(run, 0)
    assert last_word(tmp_path, 0, 9, failed=False) == "nothing found in 9 steps"


def test_the_last_line_waits_for_the_pass_that_saw_the_whole_run(tmp_path: Path):
    run = RunDirectory(tmp_path)
    lock = NodeLock(run.monitor_lock(0))
    assert lock.acquire()
    announce(run, 0, None)
    for not_it in (
        LastPass(0, 9, True),
        LastPass(0, 20, False),
        LastPass(1, 20, True),
    ):  # another run's, a part, another
        looked(run, 0, not_it)
        assert not await_last_pass(run, 0, 0, 10, patience_seconds=0.0), not_it
    done = Timer(0.1, lambda: looked(run, 0, LastPass(0, 20, True)))
    done.start()
    assert await_last_pass(run, 0, 0, 10, patience_seconds=60.0)
    done.join()
    lock.release()


def test_nobody_waits_for_a_monitor_that_is_gone(tmp_path: Path):
    run = RunDirectory(tmp_path)
    assert not await_last_pass(run, 0, 0, 10, patience_seconds=0.0), "it still starts"
    lock = NodeLock(run.monitor_lock(0))
    assert lock.acquire()
    lock.release()
    assert await_last_pass(run, 0, 0, 10, patience_seconds=60.0)
    assert await_last_pass(RunDirectory(tmp_path / "removed"), 0, 0, 10, patience_seconds=60.0)


@pytest.mark.exhaustive
def test_who_interrupts_the_wait_is_told_what_was_not_seen(tmp_path: Path):
    program = """
import os, signal, sys, time
import torch
import dtobs
from dtobs.session import last_word

def interrupted(*_):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)

last_word.await_last_pass = interrupted
dtobs.attach(torch.nn.Linear(2, 2), run_dir=sys.argv[1])
"""
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    (said,) = ended.stderr.splitlines()
    assert said.startswith("dtobs: nothing found so far in 0 steps, but the monitor has not looked at the end")


def test_what_the_monitor_has_not_seen_is_not_called_healthy(tmp_path: Path):
    said = last_word(tmp_path, 0, 5, failed=False, seen=False)
    assert said == (
        "nothing found so far in 5 steps, but the monitor has not looked at the end of the run yet:"
        f" dtobs diagnose {tmp_path}"
    )


def test_a_disk_that_is_full_may_have_swallowed_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    said = last_word(tmp_path, 0, 9, failed=False)
    assert said.startswith(
        "the disk of the run directory is full, so that what was found last may not have been written"
    )


def test_a_run_directory_that_was_removed(tmp_path: Path):
    said = last_word(tmp_path / "gone", 0, 9, failed=False)
    assert said == (
        f"the run directory {tmp_path}/gone was removed while the run went on: nothing of it is left to look at"
    )


@pytest.mark.parametrize(("said", "seconds"), [("", None), ("7.5", 7.5), ("soon", None), ("-1", None), ("nan", None)])
def test_the_hang_timeout_of_the_environment_counts_for_every_way_of_attaching(monkeypatch, capsys, said, seconds):
    monkeypatch.setenv("DTOBS_HANG_TIMEOUT", said)
    assert _timeout(None) == seconds
    assert _timeout(3.0) == 3.0
    assert ("is no number of seconds" in capsys.readouterr().err) == (bool(said) and seconds is None)
