"""Phases reach every listener, nest, and pair also when the body raises."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runtime import phases


class Log:
    def __init__(self) -> None:
        self.heard: list[object] = []

    def begin(self, name: str) -> None:
        self.heard.append(("begin", name))

    def end(self, name: str) -> None:
        self.heard.append(("end", name))

    def step(self, step: int) -> None:
        self.heard.append(step)

    def batch(self, **tensors: Tensor) -> None:
        self.heard.append(sorted(tensors))

    def report(self, **values: float) -> None:
        self.heard.append(values)


def test_two_listeners_hear_the_same_until_they_stop() -> None:
    first, second = Log(), Log()
    stop_first, stop_second = phases.listen(first), phases.listen(second)
    phases.step(3)
    with phases.phase("forward"):
        phases.batch(inputs=torch.zeros(1))
        stop_first()
        stop_first()
    phases.report(loss=1.5)
    stop_second()
    phases.step(4)
    assert second.heard == [3, ("begin", "forward"), ["inputs"], ("end", "forward"), {"loss": 1.5}]
    assert first.heard == second.heard[:-1]


def test_phases_nest_and_end_by_exceptions() -> None:
    log = Log()
    stop = phases.listen(log)
    with pytest.raises(ZeroDivisionError), phases.phase("optimizer"), phases.phase("checkpoint"):
        raise ZeroDivisionError
    stop()
    assert log.heard == [
        ("begin", "optimizer"),
        ("begin", "checkpoint"),
        ("end", "checkpoint"),
        ("end", "optimizer"),
    ]


def test_with_nobody_listening_nothing_is_made() -> None:
    assert phases.phase("forward") is phases.phase("backward")
