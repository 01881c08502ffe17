"""A rank whose loss or gradient stands apart is told as a fact; noise, own domains and an untrained model are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dtobs.detectors.silent.ranks_apart import ranks_apart
from tests.unit.detectors.runs import noisy_run

Factor = Callable[[int, int], float]


def told(tmp_path: Path, world: int, factor: Factor, *, noise: float = 0.05, steps: int = 60, own: bool = False) -> str:
    random = np.random.default_rng(4)

    def change(rank: int, step: int) -> dict[str, float]:
        return {"loss": (1 + 4 * np.exp(-step / 10)) * factor(rank, step) * random.lognormal(0, noise)}

    run = noisy_run(tmp_path, world, steps, change)
    if own:
        for rank in run.ranks:
            rank.meta("policy", data="own")
    return " ".join(ranks_apart(run.view()))


@pytest.mark.parametrize("world", [3, 4, 8])
@pytest.mark.parametrize("ratio", [3.0, 0.4])
def test_the_rank_is_named(tmp_path: Path, world: int, ratio: float):
    said = told(tmp_path, world, lambda rank, step: ratio if rank == 1 else 1.0)
    assert said.startswith("the loss of rank 1 was ")
    assert "looks, and that of ranks 0" in said


def test_a_model_that_has_just_begun_is_left_out(tmp_path: Path):
    said = told(tmp_path, 4, lambda rank, step: 1.0 + (rank == 2) * min(1.0, step / 20))
    assert said.startswith("the loss of rank 2 was ")


def test_of_two_it_takes_more(tmp_path: Path):
    assert told(tmp_path / "a", 2, lambda rank, step: 6.0 if rank else 1.0).startswith("the loss of rank ")
    assert told(tmp_path / "b", 2, lambda rank, step: 2.0 if rank else 1.0) == ""


@pytest.mark.parametrize(
    "factor",
    [
        lambda rank, step: 1.0,
        lambda rank, step: 1.2 if rank == 1 else 1.0,  # a little harder
        lambda rank, step: 3.0 if rank == step % 4 else 1.0,  # each in turn
        lambda rank, step: (1.0, 2.0, 4.0, 8.0)[rank],  # each has a domain of its own
        lambda rank, step: 3.0 if rank == 1 and step < 30 else 1.0,  # it was so at first
    ],
)
def test_what_is_usual_is_not_told(tmp_path: Path, factor: Factor):
    assert told(tmp_path, 4, factor) == ""


def test_noise_is_not_told(tmp_path: Path):
    for seed in range(6):
        assert told(tmp_path / str(seed), 4, lambda rank, step: 1.0, noise=0.6) == ""


@pytest.mark.parametrize(
    ("world", "ratio", "found"), [(4, 10.0, True), (4, 2.0, False), (2, 6.0, False), (2, 10.0, True)]
)
def test_the_gradient_of_one_rank(tmp_path: Path, world: int, ratio: float, found: bool):
    random = np.random.default_rng(4)

    def change(rank: int, step: int) -> dict[str, float]:
        return {"local_norm": (ratio if rank == 1 else 1.0) * random.lognormal(0, 0.2)}

    said = " ".join(ranks_apart(noisy_run(tmp_path, world, 60, change).view()))
    assert said.startswith("the norm of the own gradient of rank ") == found
    assert bool(said) == found


def test_what_is_declared_is_not_told(tmp_path: Path):
    assert told(tmp_path, 4, lambda rank, step: 3.0 if rank == 1 else 1.0, own=True) == ""
