"""The training's console: one line a matter, in order with what the training says, and never waited for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dtobs.findings import Confidence, Finding
from dtobs.monitor.console import Console
from dtobs.monitor.exits import Watched

HANG = Finding("rank-not-joined", "rank 1 never joined", (1,), Confidence.CERTAIN, since_ns=1)


@pytest.fixture
def rank():
    """A process whose standard error is ours to read, and which ends when its standard input does."""
    code = "import sys; sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        yield process


def watched(process: subprocess.Popen[bytes]) -> list[Watched]:
    return [Watched(0, 0, process.pid, 0)]


def test_a_hang_is_told_once_where_the_training_speaks(rank):
    console = Console(Path("runs/x"))
    warning = Finding("data-overlap", "ranks read the same", (0, 1))
    for finding in (HANG, HANG, warning):
        console.found(finding, watched(rank))
    console.cleared(HANG, 166.0, watched(rank))
    _, said = rank.communicate()
    assert said.decode().splitlines() == [
        "dtobs: rank-not-joined: rank 1 never joined; more with: dtobs diagnose runs/x",
        "dtobs: rank-not-joined is over after 3 min: the run goes on",
    ]


def test_a_hang_that_is_over_when_the_run_ends_does_not_say_that_the_run_goes_on(rank):
    console = Console(Path("runs/x"))
    console.found(HANG, watched(rank))
    console.cleared(HANG, 166.0, watched(rank), run_ended=True)
    _, said = rank.communicate()
    assert said.decode().splitlines()[1] == "dtobs: rank-not-joined is over after 3 min: the run has ended since"


def test_what_a_rank_that_hangs_calls_while_it_is_ended_is_no_matter_of_its_own(rank):
    mismatch = Finding("collective-mismatch", "different collectives", (0, 1), Confidence.CERTAIN, since_ns=2)
    ended = Console(Path("runs/x"))
    for finding in (HANG, mismatch):
        ended.found(finding, watched(rank))
    alone = Console(Path("runs/y"))
    alone.found(mismatch, watched(rank))
    _, said = rank.communicate()
    assert said.decode().splitlines() == [
        "dtobs: rank-not-joined: rank 1 never joined; more with: dtobs diagnose runs/x",
        "dtobs: collective-mismatch: different collectives; more with: dtobs diagnose runs/y",
    ]


def test_what_was_not_told_is_not_told_to_be_over(rank):
    console = Console(Path("runs/x"))
    console.cleared(HANG, 1.0, watched(rank))
    assert rank.communicate()[1] == b""


def test_it_can_be_kept_free(rank, monkeypatch):
    monkeypatch.setenv("DTOBS_CONSOLE", "0")
    Console(Path("runs/x")).found(HANG, watched(rank))
    assert rank.communicate()[1] == b""


def test_a_file_keeps_its_order(tmp_path):
    """The line follows what the training wrote, and what it writes next follows the line."""
    log = tmp_path / "log"
    with log.open("wb") as file:
        code = "import sys; print('one', file=sys.stderr, flush=True); input(); print('two', file=sys.stderr)"
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=file)
    while not log.read_bytes():
        os.sched_yield()
    Console(Path("runs/x")).found(HANG, watched(process))
    process.communicate(b"\n")
    lines = log.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("one", "two")
    assert len(lines) in (2, 3), "where the kernel does not lend the descriptor, the file is left alone"


def test_nobody_is_there_to_be_told(tmp_path, capfd):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    Console(tmp_path).found(HANG, watched(process))
    Console(tmp_path).found(HANG, [])
    assert capfd.readouterr() == ("", ""), "the monitor's own streams are nobody's console"
