"""The soak of healthy runs: it sees what is missing and what was found, and a healthy run is clean."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

from dtobs.testing.fake_run import FakeRun
from tests.benchmarks.healthy.__main__ import table
from tests.benchmarks.healthy.layouts import LAYOUTS
from tests.benchmarks.healthy.observed import missing
from tests.benchmarks.healthy.run import Outcome, judge, steps_for, train


def test_a_healthy_run_is_clean_and_what_it_lacks_is_said(tmp_path: Path) -> None:
    layout = LAYOUTS["plain_loop"]
    # The example reports no loss, and it is read from the graph in some steps only: a soak that expects one in every
    # step must say so, and keep the run.
    wanting = dataclasses.replace(layout, reports_loss=True)
    outcome = train("plain_loop", wanting, 64, tmp_path / "soak", tmp_path / "corpora", timeout=240)
    assert outcome.exit_codes == [0]
    (problem,) = outcome.problems
    assert re.fullmatch(r"no loss in \d+ of 64 steps", problem)
    assert not outcome.clean
    assert Path(outcome.run_dir).exists()
    again = Outcome("plain_loop", run_dir=outcome.run_dir)
    judge(again, layout)
    assert (again.findings, again.problems, again.steps) == ([], [], 64)
    assert again.clean


def test_a_recording_without_numbers_says_which(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run").steps(3, local_norm=math.nan, input_digest=0)
    run.rank(0).step(local_norm=math.nan, loss=math.nan)
    run.rank(1).step(local_norm=2.0, input_digest=0, loss=math.nan)
    found = missing(run.view())
    assert "rank 0: no local_norm" in found
    assert "rank 1: no local_norm" not in found
    assert "rank 1: no input_digest" in found
    assert "rank 0: no digests" in found
    assert "rank 0: state RUNNING" in found
    assert "no loss in 1 of 4 steps" in found


def test_a_pilot_says_how_many_steps_fill_the_time() -> None:
    assert steps_for(60.0, Outcome("ddp", steps=40, seconds=70.0, pace=0.25)) == 240
    assert steps_for(1.0, Outcome("ddp", steps=40, seconds=70.0, pace=0.25)) == 40


def test_the_table_counts_pilots_only_where_something_was_wrong() -> None:
    runs = [Outcome("ddp", 100, 60.0, exit_codes=[0]), Outcome("hsdp", 50, 60.0, ["straggler [1]: …"])]
    pilots = [Outcome("ddp", 40, 10.0, problems=["capture"], exit_codes=[1])]
    lines = table(runs, pilots).splitlines()
    assert lines[2] == "| ddp | 1 | 100 | 60 | 0 | 1 | 0 | 1 |"
    assert lines[3] == "| hsdp | 1 | 50 | 60 | 1 | 0 | 0 | 0 |"
    assert lines[4] == "| all | 2 | 150 | 120 | 1 | 1 | 0 | 1 |"
