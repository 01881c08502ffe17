"""Per-rank logs, the launcher's identity, the console's lines, and the generators' state."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.errors import UsageError
from runtime.output import RankOutput
from runtime.progress import Progress
from runtime.rundir import launcher_identity
from runtime.seeds import capture_generators, restore_generators, seed_process


@pytest.mark.parametrize("console", [True, False])
def test_output_goes_to_the_log_and_to_the_console_where_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, console: bool
) -> None:
    before = sys.stdout, sys.stderr
    output = RankOutput(tmp_path, console=console)
    print("out")
    print("err", file=sys.stderr)
    output.close()
    output.close()
    assert (sys.stdout, sys.stderr) == before
    assert (tmp_path / "stdout.log").read_text() == "out\n"
    assert (tmp_path / "stderr.log").read_text() == "err\n"
    assert (tmp_path / "stdout.log").stat().st_mode & 0o777 == 0o600
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == (("out\n", "err\n") if console else ("", ""))


def test_a_second_attempt_appends(tmp_path: Path) -> None:
    for text in ("one", "two"):
        output = RankOutput(tmp_path, console=False)
        print(text)
        output.close()
    assert (tmp_path / "stdout.log").read_text() == "one\ntwo\n"


def test_a_full_disk_is_said_once_and_printing_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("stdout.log", "stderr.log"):
        (tmp_path / name).symlink_to("/dev/full")
    output = RankOutput(tmp_path, console=True)
    for number in range(3):
        print("out", number, flush=True)
    print("err", file=sys.stderr)
    output.close()
    shown = capsys.readouterr()
    assert shown.out == "out 0\nout 1\nout 2\n"
    assert shown.err == (
        f"warning: cannot write the logs in {tmp_path}: No space left on device; what is printed until there is room"
        " will be missing in them\nerr\n"
    )


def test_a_full_disk_says_nothing_on_a_console_that_is_not_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stdout.log").symlink_to("/dev/full")
    output = RankOutput(tmp_path, console=False)
    print("out")
    assert capsys.readouterr() == ("", "")
    output.show()
    print("now")
    output.close()
    assert capsys.readouterr().err.count("warning: cannot write the logs") == 1


def test_a_log_that_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    before = sys.stdout, sys.stderr
    (tmp_path / "stderr.log").mkdir()
    with pytest.raises(UsageError, match=rf"^cannot write the log {tmp_path}/stderr\.log: Is a directory$"):
        RankOutput(tmp_path, console=True)
    assert (sys.stdout, sys.stderr) == before


def test_the_launchers_identity_is_stable_and_absent_without_one() -> None:
    assert launcher_identity({}) is None
    first = launcher_identity({"TORCHELASTIC_RUN_ID": "none"})
    assert first == launcher_identity({"TORCHELASTIC_RUN_ID": "none"})
    assert f"-{os.getppid()}-" in str(first)


def test_progress_lines_appear_when_a_global_loss_is_reported() -> None:
    lines: list[str] = []
    progress = Progress(lines.append, steps=20, peak_flops=0.0)
    progress.step(1)
    progress.report(loss=1.0, global_tokens=100.0, learning_rate=0.5, gradient_norm=2.0)
    assert lines == []
    progress.report(global_loss=1.25)
    assert lines[0].startswith("step      1/20  loss 1.2500  ")
    assert lines[0].endswith("gradient norm 2.000  lr 5.00e-01  0 s left")
    progress.report(validation_loss=3.0)
    progress.report(validation_loss=2.0)
    assert lines[1] == "step      1  validation loss 3.0000"
    assert "1 steps, 100 tokens" in progress.summary(1)
    assert "validation loss 3.0000 → 2.0000" in progress.summary(1)


def test_generators_come_back() -> None:
    seed_process(7)
    random.gauss(0, 1)
    np.random.standard_normal(3)
    state = capture_generators()

    def draw() -> tuple[object, ...]:
        return random.gauss(0, 1), random.random(), *np.random.standard_normal(3), torch.rand(1).item()

    expected = draw()
    restore_generators(state)
    assert draw() == expected
