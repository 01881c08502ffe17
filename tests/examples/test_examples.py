"""Every example runs as its README says, learns, and is found healthy; the one that hangs is explained."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from dtobs.cli import main
from dtobs.recording.journal import read_journal
from tests.harness import Launched, launch, torchrun, wait_until_gone
from tests.harness.launch import REPOSITORY

EXAMPLES = REPOSITORY / "examples"
HEALTHY = {"plain_loop": 2, "fsdp2_loop": 2, "single_process": 1}
CRITICAL = 4


def start(name: str, ranks: int, *flags: str | Path) -> Launched:
    script = EXAMPLES / name / "train.py"
    if ranks == 1:
        return launch([sys.executable, script, *flags])
    return torchrun([script, *flags], nproc=ranks)


def diagnose(run: Path) -> tuple[int, dict]:
    """Exit code and document of `dtobs diagnose RUN --json`."""
    with redirect_stdout(StringIO()) as out:
        code = main(["diagnose", str(run), "--json"])
    return code, json.loads(out.getvalue())


def test_every_example_is_tested():
    folders = {path.parent.name for path in EXAMPLES.glob("*/train.py")}
    assert folders == {*HEALTHY, "hang_then_diagnose"}
    assert all((EXAMPLES / name / "README.md").exists() for name in folders)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.exhaustive(one_in=4) if n == "fsdp2_loop" else ()) for n in HEALTHY]
)
def test_healthy_example(name: str, tmp_path: Path):
    run = tmp_path / "run"
    with start(name, HEALTHY[name], "--run-dir", run) as job:
        output = job.check()
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", output)]
    assert losses[-1] < losses[0]
    code, document = diagnose(run)
    assert (code, document["findings"], document["verdict"]) == (0, [], None)
    assert document["world_size"] == HEALTHY[name]


def test_example_without_dtobs(tmp_path: Path):
    run = tmp_path / "run"
    with launch(
        [sys.executable, EXAMPLES / "single_process" / "train.py", "--run-dir", run],
        env={"DTOBS_DISABLE": "1"},
    ) as job:
        assert "loss" in job.check()
    assert not run.exists()


EXPLANATION = (CRITICAL, "stuck-in-dataloader", [1])


@pytest.mark.parametrize(
    "ending",
    [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.exhaustive)],  # tests/faults has more endings
    ids=lambda s: s.name,
)
def test_hang_is_explained_while_it_hangs_and_afterwards(ending: signal.Signals, tmp_path: Path):
    """Ended by Ctrl-C, which torchrun passes on, or by a scheduler that kills everything at once.

    A diagnosis may see the hang a moment before the monitor, whose word is what outlives everything.
    """
    run = tmp_path / "run"
    with start("hang_then_diagnose", 2, "--run-dir", run, "--hang-timeout", "3") as job:
        deadline = time.monotonic() + 150
        while (now := verdict(run)) is None or not read_journal(run / "findings.jsonl"):
            assert job.process.poll() is None, job.stderr
            assert time.monotonic() < deadline, f"no verdict\n{job.stdout}\n{job.stderr}"
            time.sleep(0.5)
        assert now == EXPLANATION
        if ending == signal.SIGINT:
            job.signal(signal.SIGINT)
            job.wait(60)
            assert wait_until_gone(job.pids(), timeout=60) == []
    assert verdict(run) == EXPLANATION


def verdict(run: Path) -> tuple[int, str, list[int]] | None:
    """Exit code, code and ranks of the verdict; None as long as there is none."""
    if not (run / "run.json").exists():
        return None
    code, document = diagnose(run)
    found = document["verdict"]
    return (code, found["code"], found["ranks"]) if found else None
