"""Native code crashes a rank, or ``os._exit`` ends it: the line of Python is told, the program sees no difference."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dtobs.diagnose import diagnose, gather
from dtobs.recording.view import load_run
from tests.unit.detectors_hangs.test_crashes import gone
from tests.unit.detectors_hangs.trouble import found

pytestmark = pytest.mark.slow  # processes of its own

PROGRAM = """
import ctypes, faulthandler, os, sys, threading, time
import torch
import dtobs

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = dtobs.attach(model, optimizer, run_dir=sys.argv[1])

def train():
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

def crash():
    ctypes.string_at(0)

"""
LINE = PROGRAM.splitlines().index("    ctypes.string_at(0)") + 1


def ends(tmp_path: Path, rest: str) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM + rest)
    command = [sys.executable, str(program), str(tmp_path / "run")]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_line_is_told_and_the_exit_code_stays(tmp_path: Path):
    done = ends(tmp_path, "train(); crash()")
    assert done.returncode == -signal.SIGSEGV and "Fatal Python error" not in done.stderr
    verdict = diagnose(gather(tmp_path / "run")).verdict
    assert verdict is not None and verdict.code == "rank-dead"
    assert f"killed by SIGSEGV, last at {tmp_path}/train.py:{LINE} in crash of step 4" in verdict.summary
    assert "line shown" in verdict.next_step
    assert any(f"train.py:{LINE} in crash" in str(record.get("frames")) for record in verdict.evidence)


def test_where_a_program_leaves_by_the_back_door_is_told(tmp_path: Path):
    """As the watchdogs do that programs write for themselves: from a thread, with a code of their own."""
    rest = "def watchdog():\n    os._exit(7)\ntrain(); threading.Thread(target=watchdog).start(); time.sleep(60)"
    done = ends(tmp_path, rest)
    assert done.returncode == 7 and "watchdog" not in done.stderr
    verdict = diagnose(gather(tmp_path / "run")).verdict
    assert verdict is not None and verdict.code == "rank-dead"
    assert "exited with code 7, last at " in verdict.summary and "in watchdog of step 4" in verdict.summary
    assert "os._exit" in verdict.next_step and "line shown" in verdict.next_step


@pytest.mark.parametrize("when", ["faulthandler.enable(); train()", "train(); faulthandler.enable()"])
def test_a_program_that_asks_for_its_own_has_it_on_its_own_stream(tmp_path: Path, when: str):
    done = ends(tmp_path, f"{when}; session.close(); crash()")
    assert done.returncode == -signal.SIGSEGV and f"line {LINE} in crash" in done.stderr
    assert load_run(tmp_path / "run").rank(0).crash is None


def test_the_crash_of_a_forked_child_is_not_the_ranks(tmp_path: Path):
    done = ends(tmp_path, "train()\nif os.fork() == 0: crash()\nos.wait()\nos.kill(os.getpid(), 9)")
    assert done.returncode == -signal.SIGKILL
    rank = load_run(tmp_path / "run").rank(0)
    assert rank.crash is None and rank.stack is None


def test_nothing_is_left_on_after_the_session(tmp_path: Path):
    done = ends(tmp_path, "assert faulthandler.is_enabled(); session.close(); assert not faulthandler.is_enabled()")
    assert done.returncode == 0, done.stderr


NATIVE = """Fatal Python error: {what}

Thread 0x00007f01 (most recent call first):
  File "/me/prefetch.py", line 5 in fill

{whose} 0x00007f02 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/_ops.py", line 1269 in __call__
  File "/me/train.py", line 30 in step

Extension modules: numpy.core._multiarray_umath, torch._C (total: 2)
"""


@pytest.mark.parametrize("code", [-11, None])  # as the kernel said, or unseen: an old kernel, and the parent was first
def test_a_crash_of_native_code_is_told_with_the_line_that_called_it(training, code):
    run = training(2)
    run.directory.stacks(1, 0).write_text(NATIVE.format(what="Segmentation fault", whose="Current thread"))
    (finding,) = found(run.view(later=1, processes={1: gone(code)})).values()
    assert (finding.code, finding.ranks, finding.confidence) == ("rank-dead", (1,), "certain")
    assert "killed by SIGSEGV, last at /me/train.py:30 in step" in finding.summary
    assert finding.next_step.startswith("Look at the line shown")


def test_a_library_thread_that_aborts_the_rank_is_not_taken_for_its_line(training):
    run = training(2)
    run.directory.stacks(1, 0).write_text(NATIVE.format(what="Aborted", whose="Thread"))
    (finding,) = found(run.view(later=1, processes={1: gone(-6)})).values()
    assert (finding.code, finding.confidence) == ("rank-dead", "likely")
    assert "last at /me/train.py:30 in step" in finding.summary and "terminate called" in finding.next_step


def test_what_was_written_before_it_was_killed_is_not_how_it_ended(training):
    run = training(2)
    run.directory.stacks(1, 0).write_text(NATIVE.format(what="Segmentation fault", whose="Current thread"))
    (finding,) = found(run.view(later=1, processes={1: gone(-9)})).values()
    assert "killed by SIGKILL" in finding.summary and "/me/train.py" not in finding.summary
