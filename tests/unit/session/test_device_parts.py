"""A step's parts as a device spends them, told by a fake of its stream and events: no test here has a device.

The fake keeps the time at which its stream is done with what was launched. Host and device have clocks of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn

from dtobs.events import STEP_PARTS, Phase
from dtobs.recording.view import load_run
from dtobs.session import Session
from tests.unit.session.conftest import make_model

Attach = Callable[..., Session]
MS = 1_000_000


@dataclass
class Event:
    stream: Stream
    at: int

    def query(self) -> bool:
        return self.stream.host >= self.at

    def elapsed_time(self, end: Event) -> float:
        assert self.query() and end.query(), "asked before it has passed: on a device that raises"
        return (end.at - self.at) / 1e6


@dataclass
class Stream:
    """`host` is the host's time, `free` when all that was launched is done."""

    host: int = 0
    free: int = 0
    events: list[Event] = field(default_factory=list)
    capturing: bool = False
    name: str = "default"

    def launch(self, ms: float) -> None:
        self.free = max(self.free, self.host) + round(ms * MS)

    def mark(self) -> Event | None:
        if self.capturing:
            return None
        self.events.append(Event(self, max(self.free, self.host)))
        return self.events[-1]


class Launching(nn.Module):
    """A layer whose forward and backward are so long on the stream; and the optimizer that trains it."""

    optimizer: torch.optim.Optimizer

    def __init__(self, stream: Stream, forward: float, backward: float) -> None:
        super().__init__()
        self.layer, self.stream, self.ms = nn.Linear(4, 4), stream, (forward, backward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.stream.launch(self.ms[0])
        y = self.layer(x)
        y.register_hook(lambda gradient: self.stream.launch(self.ms[1]))
        return y


def on_device(session: Session, stream: Stream) -> None:
    (probe,) = [p for p in session._probes.context.probes if p.name == "device times"]
    session._probes.progress.host_waits = False
    probe.use(stream.mark, lambda: stream.name)


def records(session: Session, stream: Stream) -> np.ndarray:
    """The steps once the device is done with everything."""
    stream.host = 10**15
    for probe in session._probes.context.probes:
        probe.late.poll()
    session._probes.progress.flush()
    for probe in session._probes.context.probes:
        probe.late.poll()
    return load_run(session.run_dir).rank_steps(0)


def run(session: Session, stream: Stream, model: Launching, steps: int, wait: float = 200.0) -> None:
    progress = session._probes.progress
    for _ in range(steps):
        with session.phase("data"):
            stream.host += MS  # the loader is ahead
        model(torch.ones(2, 4)).sum().backward()
        progress.wait_begin(7, 1)  # as Work.wait: the stream waits, the host goes on
        stream.launch(wait)
        progress.wait_end(7, 1)
        stream.launch(100)
        model.optimizer.step()


def started(attach: Attach, stream: Stream, forward: float = 300, backward: float = 500) -> tuple[Session, Launching]:
    model = Launching(stream, forward, backward)
    model.optimizer = torch.optim.SGD(model.parameters(), 0.1)  # a session keeps none alive
    session = attach(model, model.optimizer)
    on_device(session, stream)
    session._probes.progress.dimensions[7] = 2  # tensor
    return session, model


def test_the_parts_are_what_the_stream_did(attach: Attach):
    stream = Stream()
    session, model = started(attach, stream)
    run(session, stream, model, 6)
    steps = records(session, stream)[1:-1]  # the first begins before there are events
    assert len(steps) >= 3
    for row in steps:
        assert sum(int(row[f"{part}_ns"]) for part in STEP_PARTS) == row["end_ns"] - row["begin_ns"]
        assert row["forward_ns"] == 300 * MS
        assert row["backward_ns"] == 500 * MS
        assert row["exposed_ns"] == row["exposed_tensor_ns"] == 200 * MS
        assert row["data_ns"] == 0, "the host was ahead of the device: nothing waited for data"
        assert row["device_marks"] > 4
        assert row["device_idle_marks"] == 0
    assert (steps["end_ns"] - steps["begin_ns"] == 1100 * MS).all()


def test_a_host_that_is_too_slow_is_seen(attach: Attach):
    stream = Stream()
    session, model = started(attach, stream, forward=1, backward=1)
    progress = session._probes.progress
    for _ in range(6):
        with session.phase("data"):
            stream.host += 50 * MS  # the stream has been done for long
        stream.launch(1)
        stream.host += 30 * MS
        progress.begin(3)  # forward
        stream.host += 30 * MS
        progress.end_named(3)
        model(torch.ones(2, 4)).sum().backward()
        model.optimizer.step()
    row = records(session, stream)[3]
    assert row["device_idle_marks"] >= 0.5 * row["device_marks"]
    assert row["data_ns"] >= 45 * MS, "now the device does wait for data"


def test_a_graph_that_is_captured_is_left_alone(attach: Attach):
    stream = Stream()
    session, model = started(attach, stream)
    run(session, stream, model, 2)
    stream.capturing = True
    before = len(stream.events)
    run(session, stream, model, 2)
    assert len(stream.events) == before
    stream.capturing = False
    run(session, stream, model, 3)
    steps = records(session, stream)
    assert (steps["device_marks"] == 0).any(), "those steps keep the host's times"
    assert steps["forward_ns"][-2] == 300 * MS


def test_waiting_in_the_thread_of_autograd(attach: Attach):
    stream = Stream()
    session, model = started(attach, stream)
    progress = session._probes.progress
    for _ in range(4):
        depth = progress.begin(Phase.BACKWARD)
        stream.launch(400)
        seen: list[bool] = []
        thread = threading.Thread(target=lambda: seen.append(progress.stream_waits(7)))  # noqa: B023
        thread.start()
        thread.join()
        assert seen == [True]
        stream.launch(60)
        progress.stream_goes_on()
        progress.end(depth)
        model.optimizer.step()
    row = records(session, stream)[2]
    assert (row["backward_ns"], row["exposed_tensor_ns"]) == (400 * MS, 60 * MS)


def test_a_call_that_the_stream_runs_in_order_is_exposed(attach: Attach):
    """As NCCL's without `async_op`: of the stream that computes, once, and only in the training."""
    stream = Stream()
    session, model = started(attach, stream)
    progress = session._probes.progress
    for _ in range(4):
        depth = progress.begin(Phase.FORWARD)
        stream.launch(100)
        assert progress.stream_waits(7)
        assert not progress.stream_waits(7), "within another it is part of that"
        stream.launch(30)
        progress.stream_goes_on()
        stream.name = "of FSDP2"
        assert not progress.stream_waits(7), "another stream than the one that computes"
        stream.name = "default"
        inner = progress.begin(Phase.VALIDATION)
        assert not progress.stream_waits(7), "no part of the training"
        progress.end(inner)
        progress.end(depth)
        model.optimizer.step()
    row = records(session, stream)[2]
    assert (row["forward_ns"], row["exposed_tensor_ns"]) == (100 * MS, 30 * MS)


def test_events_that_fail_end_the_probe_and_nothing_else(attach: Attach):
    stream = Stream()
    session, model = started(attach, stream)
    run(session, stream, model, 1)

    def broken() -> Event:
        raise RuntimeError("CUDA error: operation not permitted")

    stream.mark = broken  # type: ignore[method-assign]
    (probe,) = [p for p in session._probes.context.probes if p.name == "device times"]
    probe.use(broken)
    run(session, stream, model, 3)
    assert not probe.active
    assert session._probes.progress.host_waits is False
    assert int(load_run(session.run_dir).page(0)["probe_failures"]) == 1
    assert len(records(session, stream)) >= 3


def test_too_many_changes_keep_the_hosts_times(attach: Attach, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dtobs.probes.device_parts.MOST_MARKS", 3)
    stream = Stream()
    session, model = started(attach, stream)
    run(session, stream, model, 3)
    assert (records(session, stream)["device_marks"] == 0).all()


def test_on_the_host_nothing_is_marked(attach: Attach):
    model = make_model()
    session = attach(model, torch.optim.SGD(model.parameters(), 0.1))
    assert session._probes.progress._device is None
    assert session._probes.progress.host_waits
