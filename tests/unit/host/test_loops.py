"""Which lines are a loop, by the bytecode of whatever Python runs the tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

from dtobs.host.loops import loops_around

Seen = list[list[tuple[int, int]]]


def _here(seen: Seen) -> None:
    """Adds the loops around the call, with lines counted from the function's own."""
    frame = sys._getframe(1)
    first = frame.f_code.co_firstlineno
    seen.append([(a - first, b - first) for a, b in loops_around(frame.f_code, frame.f_lasti)])


def one_loop(seen: Seen) -> None:
    _here(seen)
    for number in range(2):
        if number:
            continue
        _here(seen)
        len(seen)
    _here(seen)


def one_in_another(seen: Seen) -> None:
    for _ in range(1):
        for _ in range(1):
            _here(seen)
        for _ in range(1):
            len(seen)
        _here(seen)
    _here(seen)


def with_handlers(seen: Seen) -> None:
    for _ in range(1):
        try:
            _here(seen)
        except KeyError:
            continue
        except ValueError:
            len(seen)
        finally:
            len(seen)
    _here(seen)


def until_something(seen: Seen) -> None:
    number = 0
    while number < 1:
        with open("/dev/null"):
            _here(seen)
        number += 1
    _here(seen)


def for_ever(seen: Seen) -> None:
    number = 0
    while True:
        try:
            _here(seen)
        finally:
            number += 1
        if number:
            break
    _here(seen)


def _items(seen: Seen) -> Iterator[int]:
    for number in range(1):
        _here(seen)
        yield number


def through_a_generator(seen: Seen) -> None:
    for _ in _items(seen):
        _here(seen)


@pytest.mark.parametrize(
    ("function", "around"),
    [
        (one_loop, [[], [(2, 6)], []]),
        (one_in_another, [[(2, 3), (1, 6)], [(1, 6)], []]),
        (with_handlers, [[(1, 9)], []]),
        (until_something, [[(2, 5)], []]),
        (for_ever, [[(2, 7)], []]),
        (through_a_generator, [[(1, 3)], [(1, 2)]]),
    ],
)
def test_the_loops_around_a_call(function: Callable[[Seen], None], around: Seen):
    seen: Seen = []
    function(seen)
    assert seen == around
