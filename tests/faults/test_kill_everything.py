"""Every rank killed at once, at a random moment: what was recorded reads, and the checkpoint resumes.

`DTOBS_KILLS=50` repeats it as often, in one run directory; each round goes on from a checkpoint of the one before.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from dtobs.diagnose import diagnose, gather
from dtobs.recording.view import load_run
from tests.harness import is_alive, torchrun, wait_until_gone

ROUNDS = int(os.environ.get("DTOBS_KILLS", "1"))
STEP_LINE = re.compile(r"^step +(\d+)/", re.MULTILINE)
FLAGS = ("--preset", "debug", "--steps", "100000", "--checkpoint.every", "3", "--run.log_every", "1")


def rank_pids(run_dir: Path, attempt_began: float) -> list[int]:
    """The ranks' processes, from what they wrote about themselves since `attempt_began` (UTC seconds)."""
    pids = []
    for meta in sorted(run_dir.glob("ranks/*/meta-*.jsonl")):
        if meta.stat().st_mtime >= attempt_began:
            entries = [json.loads(line) for line in meta.read_text().splitlines()]
            pids += [e["pid"] for e in entries if e["t"] == "process" and "pid" in e]
    return pids


@pytest.mark.slow
@pytest.mark.timeout(90 * ROUNDS + 60)
def test_killed_at_a_random_moment_it_reads_and_resumes(tmp_path: Path):
    chance = random.Random(20_26)
    run_dir = tmp_path / "run"
    reached = 0
    for round_ in range(ROUNDS + 1):
        began = time.time()
        with torchrun(["-m", "runtime.train", *FLAGS, "--resume", "auto", "--run-dir", run_dir]) as job:
            deadline = time.monotonic() + 80
            steps: list[int] = []
            while len(steps) < 5:
                assert time.monotonic() < deadline, job.stdout + job.stderr
                assert is_alive(job.pid), job.stdout + job.stderr
                time.sleep(0.05)
                steps = [int(s) for s in STEP_LINE.findall(job.stdout)]
            if round_:
                assert steps[0] > 1, f"did not resume: began at step {steps[0]}\n{job.stdout}{job.stderr}"
            time.sleep(chance.uniform(0, 1.5))
            pids = rank_pids(run_dir, began)
            assert len(pids) == 2
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            assert wait_until_gone(pids, 10) == []
            job.wait(60)
        view = load_run(run_dir)
        assert view.damaged == []
        assert view.ranks == [0, 1]
        for rank in view.ranks:
            taken = view.rank_steps(rank)["step"]
            assert list(taken) == list(range(taken[0], taken[-1] + 1))
            assert len(view.events(rank))
        reached = max(reached, int(view.pages["step"].max()))
        found = diagnose(gather(run_dir))
        assert found.verdict is not None
        assert found.verdict.code == "rank-dead"
    assert reached > 3
