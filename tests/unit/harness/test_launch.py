"""Command lines under test, and torchrun with its workers in sessions of their own."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.harness import Gate, launch, torchrun, wait_until_gone

pytestmark = pytest.mark.slow  # processes of its own

WORKER = """
import os, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
(folder / f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
(folder / f"ready{os.environ['RANK']}").touch()
while not (folder / "go").exists():
    time.sleep(0.01)
rank, world, threads = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS"))
os.write(1, f"rank {rank} of {world} threads {threads}\\n".encode())  # whole lines: the ranks share the file
"""


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return path


def test_torchrun_runs_ranks(worker: Path, tmp_path: Path):
    (tmp_path / "go").touch()
    with torchrun([worker, tmp_path], nproc=2) as job:
        lines = sorted(job.check().splitlines())
    assert lines == ["rank 0 of 2 threads 1", "rank 1 of 2 threads 1"]


def test_leaving_kills_the_workers_too(worker: Path, tmp_path: Path):
    with torchrun([worker, tmp_path], nproc=2) as job:
        for rank in range(2):
            Gate(tmp_path / f"ready{rank}").wait(60)
        pids = [job.pid, *(int((tmp_path / f"pid{rank}").read_text()) for rank in range(2))]
        assert set(pids) <= set(job.pids())
    assert wait_until_gone(pids, timeout=10) == []


def test_failure_shows_the_output():
    with (
        launch([sys.executable, "-c", "print('so far'); raise SystemExit('bad disk')"]) as command,
        pytest.raises(AssertionError, match=r"exited 1\n--- stdout\nso far\n--- stderr\nbad disk"),
    ):
        command.check()


def test_deadline_shows_the_output(tmp_path: Path):
    code = "import pathlib, sys, time; print('waiting', flush=True); pathlib.Path(sys.argv[1]).touch(); time.sleep(99)"
    with launch([sys.executable, "-c", code, tmp_path / "on"]) as command:
        Gate(tmp_path / "on").wait(30)
        with pytest.raises(TimeoutError, match=r"still runs after 0.1 s\n--- stdout\nwaiting"):
            command.wait(0.1)
        command.signal(signal.SIGTERM)
        assert command.wait(10) == -signal.SIGTERM
