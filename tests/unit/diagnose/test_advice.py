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


@pytest.mark.parametrize(
    ("log", "earlier", "cause", "restart", "code"),
    [
        (FAILED, None, "workload", "no", 4),
        (FAULT, None, "machine", "unsure", 3),
        (KILLED, None, "unknown", "yes", 0),
        (KILLED, KILLED, "unknown", "no", 4),
        ("step 1 loss 2\n" + KILLED, None, "unknown", "yes", 0),
        ("step 9 loss 2\n" + KILLED, FAILED, "unknown", "yes", 0),
        (CANCELLED, None, "unknown", "yes", 0),
    ],
    ids=["exception", "fault", "killed", "killed twice", "killed after a step", "another root", "cancelled"],
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
