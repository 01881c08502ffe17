"""``dtobs top`` without the live screen: text, JSON, exit codes, errors."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dtobs.cli import main
from dtobs.errors import TargetError
from dtobs.recording.arrivals import arrive, become, write_arrival
from dtobs.recording.rundir import RunDirectory
from dtobs.testing.fake_run import FakeRun
from dtobs.tui.columns import fitting
from dtobs.tui.plain import render
from dtobs.tui.source import DirectorySource, newest_run
from tests.unit.tui.scene import FakeSource, stalled_run, write_findings

BLOCK_TEXTUAL = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("textual", "rich", "torch"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Block())
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "textual" else real(name, *a)
from dtobs.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_once(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakeRun(tmp_path / "run", 2).steps(3)
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["top", str(tmp_path / "run"), "--once"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("fake: running · 2 ranks on 1 host · ")
    assert "no findings" in text
    assert max(map(len, text.splitlines())) <= 100
    write_findings(stalled_run(tmp_path / "stalled", steps=3))
    assert main(["top", str(tmp_path / "stalled"), "--once"]) == 4
    text = capsys.readouterr().out
    assert "critical  stuck-in-dataloader  rank 5  step 1,240" in text
    assert "  next: Check the storage" in text
    del run


def test_json_and_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = stalled_run(tmp_path / "run", steps=3)
    write_findings(run)
    lines = run.directory.findings.read_text().splitlines()
    run.directory.findings.write_text(lines[0] + "\n")
    assert main(["top", str(tmp_path / "run"), "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["findings"][0]["code"] == "straggler"


def test_a_cleared_finding_is_no_finding(tmp_path: Path) -> None:
    run = stalled_run(tmp_path / "run", steps=3)
    write_findings(run)
    found = run.directory.findings.read_text()
    run.directory.findings.write_text(found + found.replace('"found"', '"cleared"'))
    assert main(["top", str(tmp_path / "run"), "--once"]) == 0


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["nowhere", "--once"], 1, "dtobs: there is no directory nowhere. Give a run directory"),
        (["--once"], 1, "dtobs: there is no run below"),
        (["empty", "--interval", "0"], 2, "dtobs: --interval 0: give seconds between 0.1 and 3600"),
        (["empty"], 2, "dtobs: the live screen needs a terminal; use --once or --json"),
        (["other", "--once"], 1, "is not a run directory of dtobs: it holds neither run.json nor nodes/"),
    ],
)
def test_errors(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    assert main(["top", *arguments]) == code
    assert text in capsys.readouterr().err


def test_without_textual(tmp_path: Path) -> None:
    FakeRun(tmp_path / "run", 2).steps(3)

    def top(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", BLOCK_TEXTUAL, "top", str(tmp_path / "run"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert top("--once").returncode in (0, 3, 4), top("--once").stderr
    assert json.loads(top("--json").stdout)["world_size"] == 2
    live = top()
    assert live.returncode == 1
    assert live.stderr == "dtobs: this needs the package 'textual': pip install 'dtobs[tui]'\n"


def test_the_newest_run(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="name a run directory, or start one"):
        newest_run(tmp_path)
    FakeRun(tmp_path / "runs" / "20260102T000000Z-b", 1).steps(1)
    FakeRun(tmp_path / "runs" / "20260103T000000Z-a", 1).steps(1)
    (tmp_path / "runs" / "20260104T000000Z-not-a-run").mkdir()
    assert newest_run(tmp_path).name == "20260103T000000Z-a"


def test_a_directory_that_fills_and_goes_away(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    source = DirectorySource(root)
    assert source.look().status_text == "no rank has recorded yet"
    run = FakeRun(root, 2)
    assert source.look().status == "empty"
    run.steps(2)
    assert len(source.look().rows) == 2
    assert source.detail(1) is not None
    assert source.detail(7) is None
    shutil.rmtree(root)
    gone = source.look()
    assert (gone.status, gone.status_text, len(gone.rows)) == ("gone", "its directory is gone", 2)
    FakeRun(root, 3).steps(1)
    assert len(source.look().rows) == 3


def test_what_ended_a_job_before_it_had_a_process_group_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = RunDirectory(tmp_path / "run")
    run.create()
    run.write_run({"name": "run", "world_size": 2})
    error = "ValueError: no data (train.py:3 in main)"
    write_arrival(run, become(arrive(1, 2, 0), "failed", error=error, uncaught=True))
    assert main(["top", str(run.root), "--once"]) == 4
    assert f"rank 1 failed before init_process_group was called: {error}" in " ".join(capsys.readouterr().out.split())


def test_columns_fit_every_width(tmp_path: Path) -> None:
    frame = FakeSource(stalled_run(tmp_path / "run", steps=3)).look()
    for width in range(40, 220):
        columns = fitting(frame, width)
        assert sum(c.width + 2 for c in columns) <= max(width, 36)
        assert {"rank", "state", "step"} <= {c.key for c in columns}
    assert "host" in {c.key for c in fitting(frame, 220)}
    for width in (60, 80, 100, 200):
        assert max(map(len, render(frame, width).splitlines())) <= width


def test_many_ranks_as_text(tmp_path: Path) -> None:
    frame = FakeSource(FakeRun(tmp_path / "run", 100).steps(1)).look()
    assert "… 64 of 100 ranks, those that differ first" in render(frame)
