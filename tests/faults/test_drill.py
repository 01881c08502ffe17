"""One drill of each family as a user runs it, with its healthy twin."""

from __future__ import annotations

import json
import sys

import pytest

from tests.harness import launch, wait_until_gone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        pytest.param("exception", "uncaught-exception", marks=pytest.mark.exhaustive),
        ("nan", "gradient-nonfinite"),
    ],
)
def test_a_drill_finds_its_fault_and_leaves_nothing_behind(tmp_path, fault, code):
    arguments = [
        sys.executable,
        "-m",
        "dtobs",
        "drill",
        fault,
        "--wrapper",
        "ddp",
        "--json",
        "--keep",
        str(tmp_path / "kept"),
    ]
    with launch(arguments, timeout=240) as command:
        assert command.wait() == 0, command.stderr + command.stdout
        twin, drill = json.loads(command.stdout)
        assert wait_until_gone(command.pids(), 20) == []
    assert (twin["fault"], twin["found"], twin["passed"]) == ("none", None, True)
    assert (drill["fault"], drill["found"], drill["passed"]) == (fault, code, True)


@pytest.mark.exhaustive(one_in=4)
@pytest.mark.slow
def test_a_hang_stays_the_verdict_when_somebody_kills_everything_before_the_alarm(tmp_path):
    arguments = [sys.executable, "-m", "dtobs", "drill", "--endings", "--way", "kill-all", "--when", "before"]
    with launch([*arguments, "--wrapper", "ddp", "absent", "--json"], timeout=240) as command:
        assert command.wait() == 0, command.stderr + command.stdout
        (row,) = json.loads(command.stdout)
        assert wait_until_gone(command.pids(), 20) == []
    assert (row["expected"], row["found"], row["ranks"]) == ("rank-not-joined", "rank-not-joined", [1])
    assert (row["confidence"], row["wrong"]) == ("possible", None)
