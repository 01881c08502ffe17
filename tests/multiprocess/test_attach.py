"""``dtobs attach`` on a hung job of two Gloo ranks that has never heard of dtobs."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from dtobs.cli import main
from dtobs.host.pyspy import NoStacks, spy
from tests.harness import torchrun

PROGRAM = """
import sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist

def load_table():
    time.sleep(600)

dist.init_process_group("gloo", timeout=timedelta(seconds=900))
value = torch.ones(4)
dist.all_reduce(value)
Path(sys.argv[1], str(dist.get_rank())).touch()
if dist.get_rank() == 1:
    load_table()
dist.all_reduce(value)
"""


def _attach(pid: int, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict]:
    """Look until the ranks have come to where they stay."""
    deadline = time.monotonic() + 60
    while True:
        code = main(["attach", str(pid), "--seconds", "1", "--json"])
        said = json.loads(capsys.readouterr().out)
        if said["verdict"] is not None or time.monotonic() > deadline:
            return code, said


def test_hung_job_that_was_not_prepared(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    try:
        spy(os.getpid())
    except NoStacks as error:
        if "CAP_SYS_PTRACE" in str(error) or "not installed" in str(error):
            pytest.skip(str(error))
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    with torchrun([program, tmp_path]) as job:
        deadline = time.monotonic() + 90
        while not all((tmp_path / rank).exists() for rank in "01"):
            assert job.process.poll() is None, job.stderr
            assert time.monotonic() < deadline, job.stderr
            time.sleep(0.1)
        code, said = _attach(job.pid, capsys)
        assert (code, said["verdict"]["code"], said["verdict"]["ranks"]) == (4, "rank-not-joined", [1])
        assert "train.py:8 in load_table, while rank 0 waits in all_reduce at" in said["verdict"]["summary"]
        assert said["world_size"] == 2
        assert said["ranks"]["0"]["last_collective"] == "all_reduce"
        os.kill(said["ranks"]["1"]["pid"], signal.SIGSTOP)
        code, said = _attach(job.pid, capsys)
        assert (code, said["verdict"]["code"], said["verdict"]["ranks"]) == (4, "rank-stopped", [1])
        os.kill(said["ranks"]["1"]["pid"], signal.SIGCONT)
