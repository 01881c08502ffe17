"""`dtobs diagnose --advise`: whether to start again, and without which host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dtobs.cli import main

FAILED = '[rank1]: Traceback (most recent call last):\n[rank1]:   File "t.py", line 3, in f\n[rank1]: ValueError: bad\n'
FAULT = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"
KILLED = "E0325 20:57:27.6 2606 api.py:869] failed (exitcode: -9) local_rank: 1 (pid: 2630) of binary: python\n"
CANCELLED = "step 1 loss 2\nslurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2024-04-20T09:09:37 DUE TO TIME LIMIT ***\n"
ENDED = "step 1 loss 2\nstep 2 loss 1.9\nTraining complete\n"
STUCK = "".join(
    f"[rank{rank}]:[E8 ProcessGroupNCCL.cpp:1] [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL("
    f"SeqNum=9, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for 600009 milliseconds.\n"
    for rank in range(2)
)
AGAIN = "I1125 api.py:879] [default] Worker group FAILED. {}/3 attempts left; will restart worker group\n"
STORM = "".join(f"step 8 loss 2\n{STUCK}{AGAIN.format(left)}" for left in (2, 1, 0)) + f"step 8 loss 2\n{STUCK}"


@pytest.mark.parametrize(
    ("log", "earlier", "cause", "restart", "code"),
    [
        (FAILED, None, "workload", "no", 4),
        (FAULT, None, "machine", "unsure", 3),
        (KILLED, None, "unknown", "yes", 0),
        (KILLED, KILLED, "unknown", "no", 4),
        ("step 1 loss 2\n" + KILLED, None, "unknown", "yes", 0),
        ("step 9 loss 2\n" + KILLED, FAILED, "unknown", "yes", 0),
        ("step 9 loss 2\n" + KILLED, "step 5 loss 2\n" + KILLED, "unknown", "yes", 0),
        ("step 5 loss 2\n" + KILLED, "step 5 loss 2\n" + KILLED, "unknown", "no", 4),
        (CANCELLED, None, "unknown", "yes", 0),
        (ENDED, None, "unknown", "no", 4),
        (ENDED + "step 3 loss 1.8\n", None, "unknown", "unsure", 3),
        (
            "step 6/6  loss 5.8453\nfinished: 6 steps, 3,072 tokens in 3 s, validation loss 6.2\n",
            None,
            "unknown",
            "no",
            4,
        ),
        (STUCK, None, "unknown", "yes", 0),
        (STORM, None, "unknown", "no", 4),
        (CANCELLED.replace("TIME LIMIT", "NODE FAILURE"), None, "unknown", "yes", 0),
    ],
    ids=[
        *("exception", "fault", "killed", "killed twice", "killed after a step", "another root"),
        *("further", "no further", "cancelled"),
        *("ended well", "went on", "runtime.train", "stuck", "stuck four times at one step", "another node failed"),
    ],
)
def test_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str], log, earlier, cause, restart, code):
    (tmp_path / "job.log").write_text(log)
    arguments = ["diagnose", str(tmp_path / "job.log"), "--advise", "--json"]
    if earlier is not None:
        (tmp_path / "before.log").write_text(earlier)
        arguments += ["--earlier", str(tmp_path / "before.log")]
    assert main(arguments) == code
    value = json.loads(capsys.readouterr().out)
    assert (value["schema"], value["cause"], value["restart"]) == ("dtobs.advice/1", cause, restart)
    assert value["leave_out"] == []


@pytest.mark.parametrize(
    "log",
    [
        "Nov 25 03:01:01 gpu-12 kernel: NVRM: Xid (PCI:0000:4c:00): 79, pid=1, GPU has fallen off the bus.\n" + STUCK,
        "srun: error: Node failure on gpu-12\n",
    ],
)
def test_the_host_that_a_log_names_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str], log: str):
    (tmp_path / "job.log").write_text(log)
    assert main(["diagnose", str(tmp_path / "job.log"), "--advise", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["cause"], value["restart"], value["leave_out"]) == ("machine", "yes", ["gpu-12"])
