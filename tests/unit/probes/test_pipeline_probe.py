"""The pipeline probe where there is no pipeline, what it does with a device's clock, and what it names as private."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import dtobs
from dtobs.probes import pipeline_schedule as private
from dtobs.probes.device_times import MAX_PENDING, DeviceTimes, stream_marks
from dtobs.recording.plan import Plan
from dtobs.recording.view import load_run


class FakeEvent:
    """An event at a made-up time of a device, in milliseconds."""

    def __init__(self, at: float) -> None:
        self.at, self.passed = at, True

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, later: FakeEvent) -> float:
        return later.at - self.at


def test_device_times_are_the_anchors_host_time_and_what_passed_since():
    clock = iter(map(FakeEvent, (10.0, 12.0, 15.0, 15.0, 16.0)))
    times, seen = DeviceTimes(lambda: next(clock)), []
    times.anchor()
    for _ in range(2):
        begin = times.mark()
        times.span(begin, lambda begin_ns, end_ns: seen.append((begin_ns, end_ns)))
    times.poll()
    (a, b), (c, d) = seen
    assert (b - a, c - b, d - c) == (3_000_000, 0, 1_000_000)


def test_what_has_not_passed_is_waited_for_and_too_many_are_dropped():
    event = FakeEvent(0.0)
    event.passed = False
    times, seen = DeviceTimes(lambda: event), []
    times.span(event, lambda *span: seen.append(span))
    assert times.dropped == 1  # there is no anchor to tell the time by
    times.anchor()
    for _ in range(MAX_PENDING + 1):
        times.span(event, lambda *span: seen.append(span))
    times.poll()
    assert (seen, times.dropped) == ([], 2)
    event.passed = True
    times.poll()
    assert len(seen) == MAX_PENDING


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_marks_on_a_stream():
    times, seen = DeviceTimes(stream_marks(torch.device("cuda"))), []
    times.anchor()
    begin = times.mark()
    torch.randn(512, 512, device="cuda").square().sum()
    times.span(begin, lambda *span: seen.append(span))
    torch.cuda.synchronize()
    times.poll()
    assert seen[0][1] > seen[0][0]


def test_what_is_no_schedule_switches_the_probe_off_and_nothing_else(tmp_path: Path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with dtobs.attach(model, optimizer, run_dir=tmp_path, monitor=False) as session:
        session.watch_pipeline(object())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    view = load_run(tmp_path)
    entry = view.meta(0).probes["pipeline"]
    assert entry["state"] == "failed"
    assert "object is not a schedule of torch.distributed.pipelining that dtobs knows" in entry["reason"]
    assert view.page(0)["probe_failures"] == 1
    assert len(view.rank_steps(0)) == 1


class FakeStage:
    """Makes its weights' gradients apart, past autograd, and has them reduced by a method of the name `reduces`."""

    stage_index, num_stages, is_last, device = 0, 1, True, torch.device("cpu")

    def __init__(self, submod: nn.Module, reduces: str) -> None:
        self.submod = submod
        if reduces:
            setattr(self, reduces, self._reduce)

    def _reduce(self) -> None:
        for parameter in self.submod.parameters():
            parameter.grad *= 100

    def backward_weight_one_chunk(self, micro_batch: int) -> None:
        for parameter in self.submod.parameters():
            parameter.grad = torch.ones_like(parameter)

    def forward_one_chunk(self, micro_batch: int) -> None: ...

    backward_one_chunk = forward_one_chunk
    get_fwd_send_ops = get_fwd_recv_ops = get_bwd_send_ops = get_bwd_recv_ops = forward_one_chunk


class FakeSchedule:
    def __init__(self, stage: FakeStage) -> None:
        self._stage, self._loss_fn, self._n_microbatches = stage, None, 1

    def step(self) -> None:
        self._stage.backward_weight_one_chunk(0)
        for name in ("perform_reduce_grad", "start_gradient_reduction"):
            getattr(self._stage, name, lambda: None)()


@pytest.mark.parametrize("reduces", ["perform_reduce_grad", "start_gradient_reduction", ""])
def test_gradients_made_apart_are_read_before_they_are_reduced(
    reduces: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of torch up to 2.9 (nothing is named so), since 2.10, and under FSDP2 since 2.15."""
    monkeypatch.setattr(private, "plan", lambda _: Plan("Fake", 1, (0,), 1, (0,)))
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with dtobs.attach(model, optimizer, run_dir=tmp_path, monitor=False) as session:
        schedule = FakeSchedule(FakeStage(model, reduces))
        session.watch_pipeline(schedule)
        schedule.step()
        optimizer.step()
    view = load_run(tmp_path)
    assert "pipeline" not in view.meta(0).probes
    assert view.rank_steps(0)["local_norm"].tolist() == [2.0]


def test_it_can_be_switched_off(tmp_path: Path):
    with dtobs.attach(run_dir=tmp_path, monitor=False, probes={"pipeline": "off"}) as session:
        session.watch_pipeline(object())
    assert load_run(tmp_path).page(0)["probe_failures"] == 0


def test_this_torch_has_what_was_tried():
    """The private names that the probe uses, with the versions it was tried with."""
    assert private.has_messages()
    assert any(torch.__version__.startswith(version) for version in private.TRIED)
