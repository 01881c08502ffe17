"""Numbers as words."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtobs.tui import palette, words


def test_ages_do_not_flicker() -> None:
    assert [words.age(s) for s in (0.5, 9.94, 10.2, 59.9, 61)] == [
        "500 ms",
        "9.94 s",
        "10 s",
        "59 s",
        "61 s",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (950, "950"), (1234, "1.23k"), (41_230, "41.2k"), (3.456e9, "3.46G"), (0.5, "0.50")],
)
def test_si(value: float | None, text: str) -> None:
    assert words.si(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (2.4312, "2.431"),
        (1.2e-5, "1.20e-05"),
        (1e9, "1.00e+09"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (0, "0.000"),
    ],
)
def test_number(value: float | None, text: str) -> None:
    assert words.number(value) == text


def test_clock() -> None:
    assert [words.clock(s) for s in (751, 90_061, None)] == ["00:12:31", "1d 01:01:01", "–"]


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
    for say in (words.age, words.clock, words.si, words.number):
        assert say(value)


@pytest.mark.parametrize(
    ("said", "light"), [("0;15", True), ("0;default;7", True), ("15;0", False), ("", False), ("x", False)]
)
def test_a_light_terminal_says_so(said: str, light: bool) -> None:
    assert palette.is_light({"COLORFGBG": said} if said else {}) is light
