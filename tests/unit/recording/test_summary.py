"""What a run did with its time, and the largest loss of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dtobs.events import Kind
from dtobs.findings import Finding
from dtobs.monitor.journal import Journal
from dtobs.recording.summary import ADVICE, LEAST_SECONDS, Summary, summarise
from dtobs.session.last_word import last_word
from dtobs.testing.fake_run import FakeRun


def of(run: FakeRun) -> Summary:
    found = summarise(run.view())
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("fields", "worst"),
    [
        ({"data": 0.3}, "data"),
        ({"exposed": 0.3}, "communication"),
        ({"exposed": 0.3, "exposed_data_ns": 0.0, "exposed_pipeline_ns": 0.3e9}, "waiting for messages"),
        ({"checkpoint": 0.3}, "checkpoints"),
        ({"validation": 0.3}, "validation"),
        ({"other": 0.3}, "other work in the steps"),
        ({"compile": 0.3}, "compiling"),
    ],
)
def test_the_largest_loss_is_named_with_what_to_try(tmp_path: Path, fields: dict[str, float], worst: str):
    run = FakeRun(tmp_path, 2)
    run.steps(100, **fields)
    found = of(run)
    assert (found.steps, found.ranks, found.attempts, found.whole) == (100, 2, 1, True)
    assert max(found.losses, key=lambda name: found.losses[name]) == worst
    productive = found.elapsed * found.goodput
    assert productive + sum(found.losses.values()) == pytest.approx(found.elapsed)
    assert productive == pytest.approx(100 * 0.094, rel=1e-6)
    first, second = found.lines()
    assert first.startswith("100 steps of ")
    assert f"goodput {found.goodput:.0%}" in first
    assert second == (
        f"the largest loss is {worst} (30 s, {0.3 / (found.elapsed / 100):.0%} of the time): {ADVICE[worst]}"
    )


def test_waiting_for_messages_is_the_pipelines_where_there_is_a_schedule(tmp_path: Path):
    run = FakeRun(tmp_path, 2)
    run.steps(100, exposed=0.3, exposed_data_ns=0.0, exposed_pipeline_ns=0.3e9)
    run.ranks[1].meta("pipeline", schedule="1F1B")
    losses = of(run).losses
    assert max(losses, key=lambda name: losses[name]) == "waiting in the pipeline"


@pytest.mark.parametrize(("waits", "named"), [((0.25, 0.01, 0.2), True), ((0.25, 0.2, 0.2), False)])
def test_who_keeps_the_others_waiting_for_messages_is_named(tmp_path: Path, waits: tuple[float, ...], named: bool):
    run = FakeRun(tmp_path, 3)
    for rank, waited in zip(run.ranks, waits, strict=True):
        for _ in range(100):
            rank.event(Kind.P2P, value=1.0).event(Kind.WAIT_END, value=waited)
            rank.step(exposed=0.3, exposed_data_ns=0.0, exposed_pipeline_ns=0.3e9)
    said = of(run).lines()[1]
    assert said.startswith("the largest loss is waiting for messages (30 s, ")
    assert (
        said.endswith(
            "of the time), mostly for rank 1, which hardly waits itself: look at what it does between its messages"
        )
        is named
    )


def test_ranks_that_take_turns_in_being_late_are_waited_for(tmp_path: Path):
    run = FakeRun(tmp_path, 2)
    for rank in run.ranks:
        for step in range(100):
            late = step % 2 == rank.number
            rank.step(forward=0.2 if late else 0.1, exposed=0.01 if late else 0.11)
    losses = of(run).losses
    assert losses["waiting for slower ranks"] == pytest.approx(100 * 0.05)
    assert losses["communication"] == pytest.approx(100 * 0.01)


def test_tokens_that_two_stages_of_a_pipeline_work_on_count_once(tmp_path: Path):
    run = FakeRun(tmp_path, 2)
    for rank in run.ranks:
        for _ in range(100):
            rank.step(tokens=1024)
    assert of(run).tokens == 2 * 100 * 1024
    for rank in run.ranks:
        rank.page(tokens=100 * 1024, global_tokens=100 * 1024)
    assert of(run).tokens == 100 * 1024


def test_waiting_for_a_slower_rank_is_not_communication(tmp_path: Path):
    run = FakeRun(tmp_path, 2)
    for _ in range(100):
        run.rank(0).step(exposed=0.3)
        run.rank(1).step(forward=0.335, exposed=0.005)
    found = of(run)
    assert found.losses["communication"] == pytest.approx(0.5)
    assert found.losses["waiting for slower ranks"] == pytest.approx(14.75)


@pytest.mark.parametrize(
    ("part", "late", "says"),
    [
        ("validation", lambda step: 1 if step % 10 == 9 else None, "rank 1 validates: let every rank validate a share"),
        ("checkpoint", lambda step: 0, "rank 0 saves a checkpoint: save in the background"),
        ("data", lambda step: step % 3, "one of them waits for data: look at its loader"),
        ("backward", lambda step: 2, "rank 2 computes: `dtobs top` shows who works longest"),
    ],
)
def test_what_a_late_rank_does_meanwhile_is_told(
    tmp_path: Path, part: str, late: Callable[[int], int | None], says: str
):
    run = FakeRun(tmp_path, 3)
    for step in range(100):
        for rank in run.ranks:
            longer = {part: 0.8} if rank.number == late(step) else {"exposed": 0.8} if late(step) is not None else {}
            rank.step(**longer)
    assert f"of the time), mostly while {says}" in of(run).lines()[1]


def test_waits_for_several_reasons_are_not_told_as_one(tmp_path: Path):
    run = FakeRun(tmp_path, 2)
    for step in range(100):
        run.rank(0).step(exposed=0.8)
        run.rank(1).step(**{("data", "other")[step % 2]: 0.8})
    assert "mostly" not in of(run).lines()[1]


@pytest.mark.parametrize(("delay", "told"), [(0.03, True), (0.005, False)])
def test_ranks_that_wait_for_a_core(tmp_path: Path, delay: float, told: bool):
    run = FakeRun(tmp_path, 2).steps(300, run_delay_ns=delay * 1e9)
    said = [line for line in of(run).lines() if "waited for a processor core" in line]
    assert len(said) == told
    assert not told or "(9 s, " in said[0]


@pytest.mark.parametrize(
    ("cores", "hosts", "lost", "told"),
    [
        ([[0, 1]] * 4, 1, 0.3, "4 ranks share 2 processor cores of a host"),
        ([[0], [1], [0], [1]], 1, 0.3, "4 ranks share 2 processor cores of a host"),
        ([[3]] * 4, 2, 0.3, "2 ranks share 1 processor core of a host"),
        ([[0, 1]] * 4, 2, 0.3, ""),
        ([[0, 1, 2, 3]] * 4, 1, 0.3, ""),
        ([[0], [1], [2], [3]], 1, 0.3, ""),
        ([[0, 1]] * 4, 1, 0.0, ""),  # nothing is lost by it
        ([None] * 4, 1, 0.3, ""),  # recorded before it was asked for
    ],
)
def test_more_ranks_than_cores(tmp_path: Path, cores: list[list[int] | None], hosts: int, lost: float, told: str):
    run = FakeRun(tmp_path, 4).steps(300, exposed=lost)
    for rank, mine in zip(run.ranks, cores, strict=True):
        rank.meta("process", host=f"host {rank.number % hosts}", boot_id="b", **({"cores": mine} if mine else {}))
    said = [line for line in of(run).lines() if "share" in line]
    assert len(said) == bool(told)
    assert not told or said[0].startswith(told)


def test_a_restart_and_steps_done_again(tmp_path: Path):
    first = FakeRun(tmp_path, 2)
    first.steps(100)
    second = FakeRun(tmp_path, 2, attempt=1, start_ns=first.rank(0).clock_ns + 20_000_000_000)
    for rank in second.ranks:
        for step in range(60, 160):
            rank.step(step)
    found = of(second)
    assert (found.attempts, found.steps) == (2, 200)
    assert found.losses["restarts"] == pytest.approx(20.0, abs=0.1)
    assert found.losses["steps done again"] == pytest.approx(4.0)
    assert " on 2 ranks and 1 restart in " in found.lines()[0]
    assert found.lines()[1].startswith("the largest loss is restarts (20 s")


def test_a_hang_is_no_communication_and_no_backward(tmp_path: Path):
    run = FakeRun(tmp_path, 2)
    run.steps(100)
    since = run.rank(0).clock_ns + 40_000_000
    run.rank(0).step(exposed=30.005)
    run.rank(1).step(backward=30.03)
    run.steps(100)
    stopped = Finding("rank-stopped", "rank 1 is suspended", (1,), since_ns=since)
    Journal(run.directory.findings).update([stopped], since + 20_000_000_000, may_clear=False)
    found = of(run)
    assert found.losses["standing still"] == pytest.approx(30.0, abs=0.01)
    assert found.elapsed * found.goodput == pytest.approx(201 * 0.094, abs=0.1)  # but for one step
    assert found.lines()[1].startswith("the largest loss is standing still (30 s")
    assert found.lines()[1].endswith(" of the time), as last seen: rank 1 is suspended")


def test_a_run_without_a_step_has_no_summary(tmp_path: Path):
    run = FakeRun(tmp_path, 2)
    run.rank(0)
    assert summarise(run.view()) is None


def test_a_short_run_says_nothing_of_its_time(tmp_path: Path):
    run = FakeRun(tmp_path, 2)
    run.steps(20)
    assert of(run).elapsed < LEAST_SECONDS
    assert last_word(tmp_path, 0, 20, failed=False) == "nothing found in 20 steps"


def test_the_last_word_says_what_the_run_did(tmp_path: Path):
    run = FakeRun(tmp_path, 2)
    run.steps(100, data=0.3)
    said = last_word(tmp_path, 0, 100, failed=False).split("\ndtobs: ")
    assert said[0].startswith("100 steps of 399 ms on 2 ranks in 39.9 s, 5,133 tokens a second: goodput")
    assert said[1].startswith("the largest loss is data (30 s, 75% of the time)")
    assert said[2] == "nothing found in 100 steps"


def test_of_steps_of_very_unequal_length_the_mean_is_said_as_well(tmp_path: Path):
    run = FakeRun(tmp_path, 2)
    for rank in run.ranks:
        for step in range(100):
            rank.step(None, data=0.8 if step % 4 == 0 else 0.0, forward=0.1)
    assert of(run).lines()[0].startswith("100 steps of 159 ms (359 ms on average) on 2 ranks in 35.9 s")
