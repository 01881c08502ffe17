"""The session starts the node's monitor, which lives by itself and ends by itself."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.harness import launch, processes_with_token, wait_until_gone
from tests.harness.processes import command_line

SCRIPT = """
import sys, torch
import dtobs
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with dtobs.attach(model, optimizer, run_dir=sys.argv[1]) as session:
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward(); optimizer.step()
    sys.stdin.read(1)
"""


def test_the_monitor_outlives_its_rank_by_a_little(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("import time, pathlib\n" + SCRIPT.replace("sys.stdin.read(1)", _WAIT))
    (tmp_path / "logging.py").write_text("raise SystemExit('a file of the user, not the standard library')")
    with launch([sys.executable, "-P", script, tmp_path / "run", tmp_path / "go"], cwd=tmp_path, timeout=240) as job:
        # The parent's words until the child's exec: those of the monitor are waited for, not read once.
        monitor = _until(lambda: [p for p in processes_with_token(job.token) if "dtobs.monitor" in command_line(p)])
        assert len(monitor) == 1
        assert Path(f"/proc/{monitor[0]}/stat").read_text().split()[5] == str(monitor[0])  # its own session
        _until(lambda: (tmp_path / "run/monitor.json").exists())
        (tmp_path / "go").touch()
        assert job.wait() == 0
        assert job.stderr.startswith("dtobs: nothing found in ")
        assert wait_until_gone(monitor, 30) == []


_WAIT = "\n    while not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.02)"


def _until(look):  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + 120
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found
