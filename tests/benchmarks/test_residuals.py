"""The table of residuals: its equations hold in a healthy training, and one that does not hold is said so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dtobs.drills.silent import SilentJob
from dtobs.recording.view import load_run
from tests.benchmarks.residuals import equations, main, row
from tests.faults.silent_programs import run_silent
from tests.harness import run_ranks


def test_every_equation_of_a_healthy_training_holds(tmp_path: Path, capsys):
    run_ranks(run_silent, 2, SilentJob(tmp_path, "none", "ddp", steps=12), timeout=120)
    found = list(equations(load_run(tmp_path)))
    assert [each.law for each in found] == ["L1", "L1", "L2", "L2", "L3", "replicas", "L7"]
    assert all(each.holds for each in found)
    by_law = {each.equation: each for each in found}
    assert by_law["S(H of r) = λ Σ S(G of q)"].checked >= 2 and by_law["S(H of r) = λ Σ S(G of q)"].worst < 1e-5
    assert by_law["θ, m, v at rest: the same bits"].checked >= 2 * 10
    assert by_law["digest(θ of r) = digest(θ of q)"].checked >= 10 * 4
    assert by_law["what went in = what came out"].checked >= 10
    assert main(["--run", str(tmp_path)]) == 0
    header, _, allowed, line = capsys.readouterr().out.splitlines()
    assert header.count("|") == allowed.count("|") == line.count("|") == len(found) + 2
    assert "BROKEN" not in line


def test_an_equation_that_does_not_hold_is_broken(tmp_path: Path, capsys):
    run_ranks(run_silent, 2, SilentJob(tmp_path, "flipped-bit", "ddp", at_step=4, steps=8), timeout=120)
    assert main(["--run", str(tmp_path)]) == 1
    header, *_, line = capsys.readouterr().out.splitlines()
    wrong = [law for law, cell in zip(header.split("|"), line.split("|"), strict=True) if "BROKEN" in cell]
    assert wrong == [" replicas: digest(θ of r) = digest(θ of q) "]


def test_what_was_not_checked_says_why(tmp_path: Path):
    run_ranks(run_silent, 2, SilentJob(tmp_path, "none", "ddp", steps=3), timeout=120)
    (weights,) = [each for each in equations(load_run(tmp_path)) if each.law == "L3"]
    assert weights.checked == 0
    assert row("ddp", [weights]) == "| ddp | – |"
    assert row("ddp", [replace(weights, why="compiled backward")]) == "| ddp | – (compiled backward) |"
