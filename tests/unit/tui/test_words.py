"""Numbers as words."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtobs.tui import words


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (math.nan, "–"),
        (0, "0 s"),
        (0.00085, "850 µs"),
        (0.0123, "12.3 ms"),
        (0.9999, "1.00 s"),
        (1.239, "1.24 s"),
        (59.99, "1m00s"),
        (187, "3m07s"),
        (7500, "2h05m"),
        (3 * 86400 + 4 * 3600, "3d04h"),
        (-2, "-2.00 s"),
    ],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert words.duration(seconds) == text


def test_ages_do_not_flicker() -> None:
    assert [words.age(s) for s in (0.5, 9.94, 10.2, 59.9, 61)] == [
        "500 ms",
        "9.94 s",
        "10 s",
        "59 s",
        "1m01s",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (950, "950"), (1234, "1.23k"), (41_230, "41.2k"), (3.456e9, "3.46G"), (0.5, "0.50")],
)
def test_count(value: float | None, text: str) -> None:
    assert words.count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (2.4312, "2.431"),
        (1.2e-5, "1.2e-05"),
        (1e9, "1.0e+09"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (0, "0"),
    ],
)
def test_number(value: float | None, text: str) -> None:
    assert words.number(value) == text


def test_size_and_clock() -> None:
    assert [words.size(v) for v in (512.0, 1.5 * 2**30, None)] == ["512 B", "1.50 GiB", "–"]
    assert [words.clock(s) for s in (751, 90_061, None)] == ["00:12:31", "1d 01:01:01", "–"]


def test_ranks_are_joined() -> None:
    assert words.ranks([]) == ""
    assert words.ranks([9, 3, 1, 0, 2, 7, 8]) == "0–3, 7–9"
    assert words.ranks([0, 1, 5]) == "0, 1, 5"
    assert words.ranks(range(0, 40, 2), limit=3) == "0, 2, 4 … (20)"


def test_sparkline() -> None:
    assert words.sparkline([3, 2, 1, 0], 10) == "█▆▃▁"
    assert words.sparkline([1, math.nan, 1], 10) == "▁ ▁"
    assert len(words.sparkline(list(range(1000)), 24)) == 24
    assert words.sparkline([], 5) == words.sparkline([1.0], 0) == ""


@given(st.lists(st.floats(), max_size=60), st.integers(0, 40))
def test_sparkline_of_anything(values: list[float], width: int) -> None:
    assert len(words.sparkline(values, width)) == min(width, len(values))


@given(st.floats())
def test_words_of_anything(value: float) -> None:
    for say in (words.duration, words.age, words.clock, words.count, words.size, words.number):
        assert say(value)
