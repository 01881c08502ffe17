"""config-mismatch and learning-rate-mismatch fire on ranks that are configured otherwise, and on nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtobs.detectors.silent.config_mismatch import config_mismatch
from dtobs.detectors.silent.learning_rate_mismatch import learning_rate_mismatch
from dtobs.detectors.silent.resume_mismatch import _of_other_steps, resume_mismatch
from dtobs.findings import Confidence
from dtobs.testing.fake_run import FakeRun

ALIKE = {
    "optimizer": "AdamW",
    "optimizer.weight_decay": "0.1",
    "optimizer shares": "",
    "program": "abc",
    "torch": "2.13.0",
}


def run_of(tmp_path: Path, others: dict[int, dict[str, str]], world: int = 4, at: int = 0) -> FakeRun:
    run = FakeRun(tmp_path, world)
    for rank in run.ranks:
        rank.meta("settings", step=0, fields=ALIKE)
        if rank.number in others:
            rank.meta("settings", step=at, fields=others[rank.number])
    return run.steps(8)


def test_equal_settings_are_quiet(tmp_path: Path) -> None:
    assert config_mismatch(run_of(tmp_path, {}).view()) == []


def test_the_odd_rank_and_its_field_are_named(tmp_path: Path) -> None:
    run = run_of(tmp_path, {2: {"optimizer.weight_decay": "0.0", "torch": "2.12.1"}})
    (finding,) = config_mismatch(run.view())
    assert (finding.ranks, finding.confidence) == ((2,), Confidence.CERTAIN)
    assert finding.summary == ("rank 2 has optimizer.weight_decay 0.0, the others 0.1; they also differ in torch")
    assert finding.evidence[0]["values"] == {"0": "0.1", "1": "0.1", "2": "0.0", "3": "0.1"}


def test_two_that_differ_accuse_nobody_alone(tmp_path: Path) -> None:
    (finding,) = config_mismatch(run_of(tmp_path, {1: {"optimizer": "SGD"}}, world=2).view())
    assert finding.ranks == (0, 1)
    assert finding.summary == "ranks 0 and 1 differ in optimizer: rank 0 AdamW, rank 1 SGD"


def test_the_step_since_which_settings_differ_is_told(tmp_path: Path) -> None:
    run = run_of(tmp_path, {2: {"optimizer.weight_decay": "0.0"}}, at=5)
    (finding,) = config_mismatch(run.view())
    assert finding.step == 5
    assert finding.summary == "rank 2 has optimizer.weight_decay 0.0, the others 0.1, since step 5"


def test_another_source_file_is_only_possible(tmp_path: Path) -> None:
    (finding,) = config_mismatch(run_of(tmp_path, {3: {"program": "def"}}).view())
    assert finding.confidence is Confidence.POSSIBLE


def test_a_change_that_the_others_have_not_reached_yet_is_quiet(tmp_path: Path) -> None:
    run = run_of(tmp_path, {1: {"optimizer.weight_decay": "0.0"}}, at=9)
    run.rank(1).step().step()
    assert config_mismatch(run.view()) == []


def test_optimizers_that_hold_a_part_each_may_have_other_groups(tmp_path: Path) -> None:
    parts = {n: {"optimizer shares": "a part", "optimizer.lr_scale": str(n)} for n in range(4)}
    assert config_mismatch(run_of(tmp_path, parts).view()) == []


def test_ranks_of_unknown_place_are_not_compared(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, 2, layout=None)
    for rank in run.ranks:
        rank.meta("settings", step=0, fields=ALIKE | {"optimizer": f"own{rank.number}"})
    assert config_mismatch(run.steps(8).view()) == []


@pytest.mark.parametrize(("since", "steps"), [(0, 10), (5, 10), (5, 200)])
def test_a_rate_that_parts_is_named_with_its_step(tmp_path: Path, since: int, steps: int) -> None:
    run = FakeRun(tmp_path, 4)
    for step in range(steps):
        for rank in run.ranks:
            rank.step(learning_rate=2e-3 if rank.number == 3 and step >= since else 1e-3)
    (finding,) = learning_rate_mismatch(run.view())
    assert (finding.ranks, finding.step) == ((3,), since)
    assert finding.summary == f"rank 3 trains with learning rate 0.002, the others with 0.001, since step {since}"


def test_a_schedule_on_all_ranks_and_a_difference_that_passed_are_quiet(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, 2)
    for step in range(20):
        for rank in run.ranks:
            rank.step(learning_rate=1e-3 * (step + 1) + (1e-3 if step == 7 and rank.number else 0.0))
    assert learning_rate_mismatch(run.view()) == []


def test_a_rank_that_is_a_step_behind_is_quiet(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, 2)
    for step in range(20):
        for rank in run.ranks:
            if step < 19 or rank.number:
                rank.step(learning_rate=1e-3 * (step + 1))
    assert learning_rate_mismatch(run.view()) == []


@pytest.mark.parametrize(("odd", "told"), [((3,), [(3,)]), ((1, 3), []), ((2, 3), [(0, 2), (1, 3)])])
def test_of_two_replicas_that_differ_the_rest_of_the_job_tells_which_is_odd(
    tmp_path: Path, odd: tuple[int, ...], told: list[tuple[int, ...]]
) -> None:
    """Pairs of data ranks, 0 and 2, 1 and 3: each pair is divided, the job may not be."""
    run = FakeRun(tmp_path, 4)
    for rank in run.ranks:
        rank.meta("layout", kind="fsdp", data_ranks=[rank.number % 2, rank.number % 2 + 2])
        rank.meta("settings", step=0, fields=ALIKE | {"dropout": "0.2" if rank.number in odd else "0.1"})
        for _ in range(12):
            rank.step(learning_rate=2e-3 if rank.number in odd else 1e-3)
    view = run.view()
    assert [f.ranks for f in learning_rate_mismatch(view)] == told
    assert [f.ranks for f in config_mismatch(view)] == told


AHEAD = "optimizer's steps ahead of this run"


@pytest.mark.parametrize(
    ("ahead", "shares", "ranks", "said"),
    [
        ("0 0 0 0", "", None, ""),
        ("200 200 200 200", "", None, ""),
        ("200 200 100 200", "", (2,), "rank 2 100 steps earlier than the others"),
        ("200 200 200 201", "", (3,), "rank 3 1 step later than the others"),
        (
            "-50 -150 -50 -150",
            "",
            (0, 1, 2, 3),
            "rank 1 100 steps earlier, rank 3 100 steps earlier than ranks 0 and 2",
        ),
        ("200 200 100 200", "a part", None, ""),
    ],
)
def test_optimizers_that_go_on_from_different_steps(
    tmp_path: Path, ahead: str, shares: str, ranks: tuple[int, ...] | None, said: str
) -> None:
    counts = {rank: {AHEAD: number, "optimizer shares": shares} for rank, number in enumerate(ahead.split())}
    view = run_of(tmp_path, counts, at=5).view()
    assert config_mismatch(view) == []
    found = resume_mismatch(view)
    assert [f.ranks for f in found] == ([] if ranks is None else [ranks])
    for one in found:
        assert (one.step, one.confidence) == (5, Confidence.LIKELY)
        assert said in one.summary
        assert "Load the same step on all ranks" in one.next_step
    if ranks == (2,):
        assert _of_other_steps(view, {2}) == [], "it has loaded nothing, which is told as that"
