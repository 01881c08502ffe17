"""Checkpoints that stall, memory that leaks or is nearly full, and what only looks like them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dtobs.detectors import run_detectors
from dtobs.findings import Confidence, Finding
from dtobs.testing.fake_run import FakeRun
from tests.unit.detectors.runs import noisy_run

GIB = float(1 << 30)
CODES = {"checkpoint-stall", "memory-leak", "memory-near-limit"}


def findings(run: FakeRun) -> list[Finding]:
    found = run_detectors(run.view(), ("performance",))
    return [f for f in found if f.code in CODES]


@pytest.mark.parametrize("world", [1, 2, 8])
def test_checkpoints_that_take_a_third_of_the_time(tmp_path: Path, world: int):
    found = findings(noisy_run(tmp_path, world, 100, lambda rank, step: {"checkpoint": 20.0} if step % 10 == 9 else {}))
    assert [(f.code, f.ranks, f.step) for f in found] == [("checkpoint-stall", tuple(range(world)), 9)]
    assert "10 of them, 20 s each" in found[0].summary


HEALTHY_CHECKPOINTS = [
    lambda rank, step: {"checkpoint": 300.0} if step == 39 else {},  # the only one, at the end
    lambda rank, step: {"checkpoint": 2.0} if step % 10 == 9 else {},  # a short run: seconds
    lambda rank, step: {"forward": 20.0, "checkpoint": 20.0 if step % 10 == 9 else 0.0},  # a tenth of the time
    lambda rank, step: {"forward": 8.0, "checkpoint": 8.0},  # small states, after every step, as long as a step
    lambda rank, step: {"validation": 60.0} if step % 10 == 9 else {},
]


@pytest.mark.parametrize("change", HEALTHY_CHECKPOINTS)
def test_checkpoints_that_stall_nothing(tmp_path: Path, change):
    assert findings(noisy_run(tmp_path, 2, 40, change)) == []


def held(level):
    """Device bytes after each step, with the noise that real ones have."""
    noise = np.random.default_rng(3).uniform(0, 0.01, 4096)
    return lambda rank, step: {"device_bytes": level(rank, step) + GIB * noise[step]}


def test_a_leak_is_found_with_its_rank_and_pace(tmp_path: Path):
    change = held(lambda rank, step: 10 * GIB + (GIB / 64 * step if rank == 1 else 0))
    found = findings(noisy_run(tmp_path, 3, 240, change))
    assert [(f.code, f.ranks) for f in found] == [("memory-leak", (1,))]
    assert "rank 1 holds 1" in found[0].summary and "MiB more of device memory after every step" in found[0].summary


LEVELS = {
    "level": lambda rank, step: 10 * GIB,
    "warm-up": lambda rank, step: GIB * min(step, 8),
    "a cache that fills": lambda rank, step: 10 * GIB * (2 - np.exp(-step / 40)),
    "longer sequences from step 100 on": lambda rank, step: GIB * (10 if step < 100 else 20),
    "up and down": lambda rank, step: GIB * (10 + step % 50 / 10),
    "a validation every 20 steps": lambda rank, step: GIB * (20 if step % 20 == 0 else 10),
    "a growing curriculum in four stages": lambda rank, step: GIB * (10 + step // 60),
    "none": lambda rank, step: float("nan"),
}


@pytest.mark.parametrize("level", LEVELS.values(), ids=LEVELS)
def test_memory_that_does_not_leak(tmp_path: Path, level):
    assert findings(noisy_run(tmp_path, 2, 240, held(level))) == []


def held_by_host(level):
    """Bytes of the process's own after each step, with the noise that real ones have."""
    noise = np.random.default_rng(3).uniform(0, 0.001, 4096)
    return lambda rank, step: {"private_bytes": level(rank, step) + GIB * noise[step]}


def test_a_leak_on_the_host_is_found_at_the_rank_that_its_peers_are_unlike(tmp_path: Path):
    run = noisy_run(tmp_path, 3, 240, held_by_host(lambda r, s: GIB * (1 + s / 64 * (r == 1))))
    (found,) = run_detectors(run.view(), ("performance",))  # and that it has more than they is no cause of its own
    assert (found.code, found.ranks, found.confidence) == ("memory-leak", (1,), Confidence.POSSIBLE)
    assert "rank 1 holds" in found.summary and "of host memory after every step" in found.summary


HOST_LEVELS = {
    "level": lambda rank, step: GIB,
    "a cache of the data that still fills, on all ranks": lambda rank, step: GIB * (1 + step / 128),
    "one that fills at several paces": lambda rank, step: GIB * (1 + step / 128 * (1 + rank)),
    "one that is full": lambda rank, step: GIB * (1 + min(step, 60) / 16 * (rank == 1)),
    "losses that one rank keeps for a plot": lambda rank, step: GIB + 4096 * step * (rank == 1),
    "the heap settles": lambda rank, step: GIB * (2 - np.exp(-step / 40) * (rank == 1)),
}


@pytest.mark.parametrize("level", HOST_LEVELS.values(), ids=HOST_LEVELS)
def test_memory_of_the_host_that_does_not_leak(tmp_path: Path, level):
    assert findings(noisy_run(tmp_path, 2, 240, held_by_host(level))) == []


@pytest.mark.parametrize(
    ("passes", "level", "leaks"),
    [
        ((0, 100), lambda step: GIB * (1 + step / 128), True),
        ((0, 100, 200), lambda step: GIB * (1 + step / 128), True),
        ((0, 220), lambda step: GIB * (1 + step / 128), False),  # too little of the second pass
        ((0,), lambda step: GIB * (1 + step / 128), False),
        ((0, 100), lambda step: GIB * (1 + min(step, 100) / 64), False),  # a cache of the data that is full
        ((0, 100), lambda step: GIB * (1 + min(step, 100) / 64 + step / 4096), False),  # and what the heap adds
    ],
)
def test_memory_of_the_host_that_grows_on_all_ranks_leaks_where_all_data_was_read(
    tmp_path: Path, passes: tuple[int, ...], level: Callable[[int], float], leaks: bool
):
    run = noisy_run(tmp_path, 2, 240, held_by_host(lambda rank, step: level(step)))
    for rank in run.ranks:
        for step in passes:
            rank.meta("pass", step=step, sampler=0, shuffles=True, seed=0, epoch=0, replicas=2, samples=640)
    told = [(f.ranks, f.confidence) for f in findings(run)]
    assert told == ([((0, 1), Confidence.LIKELY)] if leaks else [])


def test_of_a_rank_without_peers_the_host_says_nothing(tmp_path: Path):
    assert findings(noisy_run(tmp_path, 1, 240, held_by_host(lambda rank, step: GIB * (1 + step / 64)))) == []


@pytest.mark.parametrize(("peak", "accused"), [(0.97, (1,)), (0.9, ())])
def test_a_device_that_is_nearly_full(tmp_path: Path, peak: float, accused: tuple[int, ...]):
    run = noisy_run(tmp_path, 2, 40, lambda rank, step: {"device_peak_bytes": 80 * GIB * (peak if rank else 0.5)})
    for rank in run.ranks:
        rank.page(device_total_bytes=80 * GIB)
    found = findings(run)
    assert [(f.code, f.ranks) for f in found] == ([("memory-near-limit", accused)] if accused else [])
