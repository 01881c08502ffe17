"""``dtobs diagnose`` from the outside: output forms and exit codes."""

from __future__ import annotations

import json

import pytest

from dtobs.cli import main
from dtobs.events import RankState
from dtobs.testing.fake_run import FakeRun


@pytest.fixture
def run_dir(tmp_path):
    run = FakeRun(tmp_path / "runs" / "20261120T120000Z-x", 2)
    run.steps(5)
    run.rank(1).meta("exception", type="ValueError", message="bad sample", t_ns=run.rank(1).clock_ns)
    run.rank(1).close(RankState.FAILED)
    return run.directory.root


def test_text_and_exit_code(run_dir, capsys):
    assert main(["diagnose", str(run_dir)]) == 4
    assert capsys.readouterr().out.startswith("Rank 1 raised ValueError: bad sample.\n")


def test_json(run_dir, capsys):
    assert main(["diagnose", str(run_dir), "--json"]) == 4
    value = json.loads(capsys.readouterr().out)
    assert (value["schema"], value["verdict"]["code"]) == ("dtobs.diagnosis/1", "uncaught-exception")


def test_html_goes_to_a_file(run_dir, tmp_path, capsys):
    assert main(["diagnose", str(run_dir), "--html", str(tmp_path / "r.html")]) == 4
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert f"written: {tmp_path / 'r.html'}" in capsys.readouterr().out


def test_html_that_cannot_be_written_is_a_usage_error(run_dir, tmp_path, capsys):
    assert main(["diagnose", str(run_dir), "--html", str(tmp_path / "no" / "r.html")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


def test_the_newest_run_is_the_default(run_dir, monkeypatch, capsys):
    monkeypatch.chdir(run_dir.parents[1])
    assert main(["diagnose"]) == 4
    assert run_dir.name in capsys.readouterr().out


def test_a_healthy_run_exits_0(tmp_path, capsys):
    run = FakeRun(tmp_path / "run", 2)
    run.steps(5)
    assert main(["diagnose", str(run.directory.root), "--no-capture"]) == 0
    assert capsys.readouterr().out.startswith("nothing found in")


def test_a_wrong_target_is_one_line(tmp_path, capsys):
    assert main(["diagnose", str(tmp_path / "nowhere")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
