"""Slow ranks and missing data, and what only looks like them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dtobs.detectors.performance.straggler import _medians_of_others
from dtobs.testing.fake_run import FakeRun
from tests.unit.detectors.runs import findings, noisy_run


def slowed(part: str, seconds: float, rank: int = 1):
    """`rank` takes `seconds` longer in `part`; the others wait for it."""

    def change(number: int, step: int) -> dict[str, float]:
        return {part: seconds} if number == rank else {"exposed": seconds + 0.03}

    return change


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("part", ["forward", "other", "data"])
def test_a_slow_rank_is_found_with_the_part_that_is_longer(tmp_path: Path, world: int, part: str):
    found = findings(noisy_run(tmp_path, world, 30, slowed(part, 0.25)))
    slow = [f for f in found if f.code == "straggler"]
    assert [f.ranks for f in slow] == [(1,)]
    assert f"({part} +" in slow[0].summary
    assert {f.code for f in found} <= {"straggler", "data-starved"}


@pytest.mark.parametrize(
    ("longer", "told"),
    [
        ({1: ("other", 0.25), 2: ("other", 0.25)}, [(1, 2)]),
        ({1: ("other", 0.25), 2: ("forward", 0.25)}, [(1,), (2,)]),
        ({1: ("other", 0.75), 2: ("other", 0.25)}, [(1,), (2,)]),
    ],
)
def test_ranks_with_which_the_same_is_the_matter_are_one_finding(
    tmp_path: Path, longer: dict[int, tuple[str, float]], told: list[tuple[int, ...]]
):
    most = max(seconds for _, seconds in longer.values())

    def change(number: int, step: int) -> dict[str, float]:
        part, seconds = longer.get(number, ("other", 0.001))
        return {part: seconds, "exposed": most - seconds + 0.03}

    found = [f for f in findings(noisy_run(tmp_path, 6, 40, change)) if f.code == "straggler"]
    assert sorted(f.ranks for f in found) == told
    if told == [(1, 2)]:
        assert found[0].summary.startswith("ranks 1 and 2 on host0 work up to ")


@pytest.mark.parametrize(
    "change",
    [
        lambda rank, step: {"validation": 3.0} if rank == 0 and step % 5 == 0 else {},
        lambda rank, step: {"checkpoint": 3.0} if rank == 0 else {},
        lambda rank, step: {"other": 0.2} if rank == step % 3 else {},  # each in turn
        lambda rank, step: {"other": 0.4} if rank == 0 and step % 3 == 0 else {},  # one that logs now and then
        lambda rank, step: {"other": 5.0} if rank == 0 and step < 2 else {},  # start-up
        lambda rank, step: {"other": 0.2, "exposed": 0.0} if rank == 0 else {"exposed": 0.0},  # nobody waits for it
        lambda rank, step: {"forward": 0.2, "exposed": 0.01},  # all alike
    ],
)
def test_steps_that_accuse_nobody(tmp_path: Path, change):
    assert findings(noisy_run(tmp_path, 3, 40, change)) == []


def test_pipeline_stages_are_not_peers(tmp_path: Path):
    run = FakeRun(tmp_path, 2, layout=None)
    for number, rank in enumerate(run.ranks):
        rank.meta("layout", kind="plain", data_ranks=[number], stage=number, dropout=0)
        for _ in range(30):
            rank.step(forward=0.3 if number else 0.05, exposed=0.0 if number else 0.25)
    assert findings(run) == []


def test_a_busy_neighbour_for_some_seconds_is_no_straggler(tmp_path: Path):
    crowded = noisy_run(tmp_path, 2, 30, slowed("forward", 0.05))  # 1.4 times, for a few seconds
    assert findings(crowded) == []


def overloaded(own: float, own_delay: float, peers_delay: float):
    """Rank 1 is `own` seconds busy, its peers 0.2, of which they waited so long for a core."""

    def change(number: int, step: int) -> dict[str, float]:
        if number == 1:
            return {"forward": own, "exposed": 0.03, "run_delay_ns": own_delay * 1e9}
        return {"forward": 0.2, "exposed": own - 0.17, "run_delay_ns": peers_delay * 1e9}

    return change


def test_who_gets_a_core_on_an_overloaded_machine_is_chance(tmp_path: Path):
    assert findings(noisy_run(tmp_path, 4, 30, overloaded(0.45, own_delay=0.35, peers_delay=0.1))) == []


@pytest.mark.parametrize(
    ("own_delay", "peers_delay"),
    [(0.1, 0.1), (0.25, 0.01), (0.0, 0.0)],
    ids=["more work, too", "only its core is taken", "more work"],
)
def test_a_straggler_is_found_among_ranks_that_wait_for_a_core(tmp_path: Path, own_delay: float, peers_delay: float):
    (found,) = findings(noisy_run(tmp_path, 4, 40, overloaded(0.45, own_delay, peers_delay)))
    assert (found.code, found.ranks) == ("straggler", (1,))


def test_a_quota_used_up_on_an_overloaded_machine_is_not_chance(tmp_path: Path):
    """The kernel counts the throttled time as waiting for a core; it is read every third step here."""
    usual = overloaded(0.45, own_delay=0.35, peers_delay=0.1)

    def change(number: int, step: int) -> dict[str, float]:
        throttled = {"throttled_ns": 3 * 0.25e9} if number == 1 and step % 3 == 0 else {}
        return usual(number, step) | throttled

    (found,) = findings(noisy_run(tmp_path, 4, 40, change))
    assert (found.code, found.ranks) == ("straggler", (1,))
    assert found.evidence[-1]["cause"] == "cpu-quota"


def test_a_small_difference_that_stays_is_found(tmp_path: Path):
    (found,) = findings(noisy_run(tmp_path, 2, 250, slowed("forward", 0.08)))
    assert (found.code, found.ranks) == ("straggler", (1,))


def test_few_steps_are_not_enough(tmp_path: Path):
    assert findings(noisy_run(tmp_path, 2, 12, slowed("forward", 0.25))) == []


def test_waiting_for_data(tmp_path: Path):
    (found,) = findings(noisy_run(tmp_path, 2, 30, lambda rank, step: {"data": 0.1}))
    assert (found.code, found.ranks) == ("data-starved", (0, 1))
    assert found.summary.startswith("ranks 0 and 1 wait for data up to ")


@pytest.mark.parametrize(
    "change",
    [
        lambda rank, step: {"data": 5.0} if step < 3 else {},  # workers start
        lambda rank, step: {"data": 2.0} if step == 20 else {},  # one slow file
        lambda rank, step: {"data": 0.01, "forward": 0.001, "backward": 0.001},  # a toy
        lambda rank, step: {"data": 0.02},
    ],
)
def test_data_in_time(tmp_path: Path, change):
    assert findings(noisy_run(tmp_path, 2, 40, change)) == []


@pytest.mark.parametrize("ranks", range(2, 8))
def test_the_medians_of_the_others_are_those_of_each(ranks: int):
    values = np.random.default_rng(ranks).integers(0, 5, (ranks, 40)).astype(float)  # many are equal
    each = [np.median(np.delete(values, member, axis=0), axis=0) for member in range(ranks)]
    np.testing.assert_array_equal(_medians_of_others(values), each)


@pytest.mark.parametrize(
    ("own", "peers", "slow", "starved"),
    [
        (0.68, 0.64, [], [(0, 1, 2)]),
        (0.68, 0.20, [(1,)], [(1,)]),  # its loader alone is slow
        (0.10, 0.10, [(1,)], [(1,)]),  # what its workers take is not what the step waits for
        (0.68, None, [(1,)], [(1,)]),
        (None, 0.68, [(1,)], [(1,)]),
    ],
)
def test_of_loaders_that_are_all_slow_none_is_a_straggler(
    tmp_path: Path,
    own: float | None,
    peers: float | None,
    slow: list[tuple[int, ...]],
    starved: list[tuple[int, ...]],
):
    """One rank waits for its data, and the others for it; two workers give a batch each 0.34 s."""
    run = noisy_run(tmp_path, 3, 40, slowed("data", 0.25))
    for number, rank in enumerate(run.ranks):
        seconds = own if number == 1 else peers
        said: object = {"workers": 2, "batches": 40, "seconds": 40 * seconds} if seconds else {"workers": "two"}
        rank.meta("process", loader_workers=said)
    found = findings(run)
    assert [f.ranks for f in found if f.code == "straggler"] == slow
    assert [f.ranks for f in found if f.code == "data-starved"] == starved
    by_workers = "because a batch takes its loader workers 680 ms, and those of its peers 200 ms"
    assert any(by_workers in f.summary for f in found) is (peers == 0.20)
    if not slow:
        (told,) = found
        assert told.summary.endswith("; the loader workers of ranks 0 and 2 take as long for a batch")
        assert told.next_step.startswith(
            "A batch takes a loader worker 680 ms, the training 118 ms: about 7 workers a rank would keep up"
        )


def bursts(ranks: tuple[int, ...], workers: int):
    """Of as many steps as the loaders of `ranks` have workers, one waits for all, as long as a batch takes a worker."""

    def change(number: int, step: int) -> dict[str, float]:
        longest = 0.25 * workers if step % workers == 0 else 0.0
        return {"data": longest} if number in ranks else {"exposed": longest + 0.03}

    return change


@pytest.mark.parametrize(("workers", "known"), [(2, True), (4, True), (8, True), (32, True), (4, False), (8, False)])
def test_of_several_loader_workers_one_step_in_as_many_waits(tmp_path: Path, workers: int, known: bool):
    run = noisy_run(tmp_path, 2, max(70, 4 * workers), bursts((0, 1), workers))
    for rank in run.ranks:
        if known:
            rank.meta("process", loader_workers={"workers": workers, "batches": 70, "seconds": 70 * 0.35 * workers})
    (found,) = findings(run)
    assert (found.code, found.ranks) == ("data-starved", (0, 1))
    assert "wait for data up to 6" in found.summary


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_a_rank_whose_loader_workers_are_slow_is_a_straggler(tmp_path: Path, workers: int):
    run = noisy_run(tmp_path, 3, 130, bursts((1,), workers))
    for number, rank in enumerate(run.ranks):
        seconds = workers * (0.35 if number == 1 else 0.1)
        rank.meta("process", loader_workers={"workers": workers, "batches": 100, "seconds": 100 * seconds})
    found = {f.code: f for f in findings(run)}
    assert found.keys() == {"straggler", "data-starved"}
    assert found["straggler"].ranks == found["data-starved"].ranks == (1,)
    assert "(data +248 ms per step) because a batch takes its loader workers" in found["straggler"].summary


@pytest.mark.parametrize("slow", [{20: 2.0}, {10: 1.5, 50: 1.5}, dict.fromkeys(range(0, 70, 20), 0.3)])
def test_a_slow_file_now_and_then_starves_nobody(tmp_path: Path, slow: dict[int, float]):
    run = noisy_run(tmp_path, 2, 70, lambda rank, step: {"data": slow.get(step, 0.002)})
    for rank in run.ranks:
        rank.meta("process", loader_workers={"workers": 4, "batches": 70, "seconds": 2.0})
    assert findings(run) == []
