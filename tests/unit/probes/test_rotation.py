"""Which rows a step looks at: the same on every rank, all of them in turn, as many as the share allows."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from dtobs.probes import rotation
from dtobs.probes.rotation import FIRST_STEPS, LEAST_EVERY, MOST_ROWS, Rotation


def seen(level: int, count: int, steps: int) -> dict[int, list[int]]:
    turn = Rotation(count)
    turn.level = level
    turn._adjust = lambda: None  # type: ignore[method-assign]
    return {step: rows for step in range(steps) if (rows := turn.rows(step)) and step >= FIRST_STEPS}


@pytest.mark.parametrize("count", [1, 7, 100, 1000])
@pytest.mark.parametrize("level", [-LEAST_EVERY, -1, 0, MOST_ROWS])
def test_every_row_has_its_turn(count: int, level: int):
    steps = seen(level, count, round(12 * count / 2.0**level) + 200)
    times = Counter(row for rows in steps.values() for row in rows)
    assert set(times) == set(range(count))
    assert max(times.values()) < 12 * min(times.values()) + 20


def test_a_rank_that_looks_more_looks_at_all_that_the_others_do():
    levels = [seen(level, 50, 400) for level in range(-LEAST_EVERY, MOST_ROWS + 1)]
    for less, more in itertools.pairwise(levels):
        assert all(set(rows) <= set(more[step]) for step, rows in less.items())


def test_a_model_without_rows_is_not_looked_at():
    assert Rotation(0).rows(1) == []


def test_everything_is_all_rows_in_all_steps():
    turn = Rotation(5, everything=True)
    assert [turn.rows(step) for step in range(3)] == [[0, 1, 2, 3, 4]] * 3


class Clock:
    """A clock that tests move."""

    now = 0

    def perf_counter_ns(self) -> int:
        return self.now


@pytest.mark.parametrize(("row_us", "every"), [(10, 0.25), (240, 1), (1200, 4), (10_000_000, 32)])
def test_looks_take_their_share_of_the_measured_step(monkeypatch: pytest.MonkeyPatch, row_us: int, every: float):
    clock = Clock()
    monkeypatch.setattr(rotation, "time", clock)
    turn, spent = Rotation(64), 0
    for step in range(4000):
        rows = turn.rows(step)
        cost = row_us * 1000 * len(rows)
        turn.spent(cost)
        clock.now += 1_100_000_000 + cost
        spent += cost if step >= 400 else 0
    assert 2.0**-turn.level == every
    if every < 32:
        assert spent < 0.00036 * (3600 * 1.1e9)
