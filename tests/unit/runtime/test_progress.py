"""What the console says at the end of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.progress import Progress, closing_lines


def test_a_run_that_had_nothing_to_do_says_why() -> None:
    progress = Progress(print, steps=20, peak_flops=0.0)
    assert progress.summary(30) == (
        "0 steps, because the checkpoint is at step 30 already; --steps above 30 trains further"
    )


def test_the_time_that_is_left_follows_from_the_steps_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("runtime.progress.time.perf_counter", lambda: now[0])
    lines: list[str] = []
    progress = Progress(lines.append, steps=1000, peak_flops=0.0)
    for step in range(1, 11):
        progress.step(step)
        now[0] += 2.0
    progress.report(global_loss=1.0)
    assert lines[-1].endswith("  33 min left")
    for step in range(11, 1001):
        progress.step(step)
        now[0] += 2.0
    progress.report(global_loss=1.0)
    assert "left" not in lines[-1]


def test_the_last_line_can_be_typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = tmp_path / "runs/x"
    monkeypatch.setattr("runtime.progress.shutil.which", lambda name: "/usr/bin/dtobs")
    assert closing_lines("5 steps", run).endswith(f"look at it: dtobs top {run}, or: dtobs diagnose {run}")
    (tmp_path / "dtobs").touch()
    monkeypatch.setattr("runtime.progress.shutil.which", lambda name: None)
    monkeypatch.setattr("runtime.progress.sys.executable", str(tmp_path / "python"))
    monkeypatch.chdir(tmp_path)
    assert closing_lines("5 steps", run).endswith("look at it: ./dtobs top runs/x, or: ./dtobs diagnose runs/x")


def test_a_resumed_run_says_what_it_did() -> None:
    progress = Progress(print, steps=5, peak_flops=0.0)
    for step in (4, 5):
        progress.step(step)
        progress.report(global_tokens=128.0)
    assert progress.summary(5).startswith("2 steps after step 3, 256 tokens in ")
