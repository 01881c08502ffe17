"""Policies on a hang, each in a real job that hangs."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import pytest

from dtobs.drills.job import Job
from tests.faults.programs import run_job
from tests.harness import start_ranks, torchrun

DEADLINE_SECONDS = 120.0

# Trains, and rank 1 of the first attempt suspends itself at a step: nothing ends, nobody says a word.
PROGRAM = """
import os, signal, sys
from runtime import loop, train, world

forward_and_backward = loop.forward_and_backward

def hanging(trainer):
    loss = forward_and_backward(trainer)
    if (os.environ["RANK"], trainer.step, os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", 5, "0"):
        os.kill(os.getpid(), signal.SIGSTOP)
    return loss

loop.forward_and_backward = hanging
if __name__ == "__main__":
    world.exit_now(train.main(sys.argv[1:]))
"""


@pytest.mark.exhaustive(one_in=4)
def test_abort_restarts_the_job_and_it_ends_from_its_checkpoint(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    words = ("--preset", "debug", "--steps", "8", "--data.sequence", "32", "--device", "cpu")
    folders = ("--run.root", str(tmp_path / "runs"), "--data.cache", str(tmp_path / "corpora"))
    policy = ("--checkpoint.every", "2", "--resume", "--hang-timeout", "3", "--run.on_hang", "abort")
    with torchrun(
        [program, *words, *folders, *policy],
        env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        options=["--max-restarts", "1"],
        timeout=280,
    ) as job:
        out = job.check()
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert f"resumed from {run_dir}/checkpoints/step-00000004 after step 4" in out
    assert "step      8/8  loss " in out
    (acted,) = [json.loads(line) for line in (run_dir / "nodes/00000/on-hang.jsonl").read_text().splitlines()]
    assert (acted["action"], acted["finding"]["code"], acted["finding"]["ranks"]) == (
        "abort",
        "rank-stopped",
        [1],
    )
    assert list((run_dir / "captures").glob("*/capture.json")), "the evidence was kept first"


REPORT = "import json, os, sys; print(json.load(sys.stdin)['code'], os.environ['DTOBS_FINDING_RANKS'])"


def test_a_command_is_run_once_and_the_job_is_left_alone(tmp_path: Path):
    job = Job(tmp_path / "run", "stopped", steps=20)
    with start_ranks(run_job, 2, job, env={"DTOBS_ON_HANG": f'command:{sys.executable} -c "{REPORT}"'}) as group:
        log = job.run_dir / "nodes/00000/on-hang.log"
        wait_until(lambda: log.exists() and log.read_text())
        group.kill(job.odd, signal.SIGCONT)
        assert group.wait(DEADLINE_SECONDS), group.stacks()
        assert [result.value for result in group.results()] == [20, 20]
    assert log.read_text() == "rank-stopped 1\n"


def wait_until(condition) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
