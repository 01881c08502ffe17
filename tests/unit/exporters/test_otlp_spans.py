"""Slow and sampled steps as spans: which, of whom, below what, and when."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from dtobs.errors import DependencyMissing, TargetError
from dtobs.events import PHASE_BY_NAME, Kind
from dtobs.exporters.look import MonitorSnapshot
from dtobs.exporters.otlp_spans import FIRST, SpanPush, choose, wanted
from dtobs.testing.fake_run import FakeRun

STEPS, SLOW = 40, 30
OUTER, INNER = PHASE_BY_NAME["validation"], PHASE_BY_NAME["forward"]


def run_of(root: Path, world: int = 2, slow: float = 0.5, ranks_per_node: int = 8) -> FakeRun:
    """Even steps, but for one; each ends with a collective, in a forward that is part of a validation."""
    run = FakeRun(root, world, ranks_per_node=ranks_per_node)
    for step in range(STEPS):
        for rank in run.ranks:
            rank.step(forward=slow if slow and step == SLOW else 0.05, other=0.01)
            end, rank.clock_ns, rank.next_step = rank.clock_ns, rank.clock_ns - 5_000_000, step
            rank.event(Kind.PHASE_BEGIN, phase=OUTER).advance(1e-3).event(Kind.PHASE_BEGIN, phase=INNER)
            rank.collective("all_reduce").advance(1e-3).event(Kind.PHASE_END, phase=INNER)
            rank.advance(1e-3).event(Kind.PHASE_END, phase=OUTER)
            rank.clock_ns, rank.next_step = end, step + 1
    return run


class Pushed:
    """What a monitor pushes of a run."""

    def __init__(self, look: MonitorSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(SpanPush, "_push_until_ended", lambda self: None)
        self.exporter, self.look = InMemorySpanExporter(), look
        self.push = SpanPush(lambda: self.look, "run", self.exporter)

    def spans(self) -> Sequence[ReadableSpan]:
        self.exporter.clear()
        self.push.push()
        return self.exporter.get_finished_spans()


def by_step(spans: Sequence[ReadableSpan]) -> dict[int, list[ReadableSpan]]:
    traces: dict[int, list[ReadableSpan]] = {}
    for span in spans:
        assert span.context is not None
        traces.setdefault(span.context.trace_id, []).append(span)
    return {
        s.attributes["step"]: found for found in traces.values() for s in found if s.attributes and s.parent is None
    }


def test_a_slow_step_and_a_sampled_one_of_each_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    view = run_of(tmp_path / "run").view()
    pushed = Pushed(MonitorSnapshot(view), monkeypatch)
    traces = by_step(pushed.spans())
    assert {step: found[0].attributes["reason"] for step, found in traces.items()} == {FIRST: "sampled", SLOW: "slow"}
    for step, found in traces.items():
        known = {span.context.span_id: span for span in found}
        assert len(known) == len(found)
        root, *below = found
        assert (root.name, root.parent) == (f"step {step}", None)
        ranks = [s for s in below if s.name in ("rank 0", "rank 1")]
        assert [s.attributes["rank"] for s in ranks] == [0, 1] and [s.parent for s in ranks] == [root.context] * 2
        for rank in ranks:
            own = {s.name: s for s in below if s.attributes["rank"] == rank.attributes["rank"] and s is not rank}
            assert own["backward"].parent == own["validation"].parent == rank.context
            assert own["forward"].parent == own["validation"].context  # the last of that name
            assert [event.name for event in rank.events] == ["all_reduce(sum, float32[1024])"]
        for span in below:
            around = known[span.parent.span_id]
            assert around.start_time <= span.start_time <= span.end_time <= around.end_time
    took = (traces[SLOW][0].end_time - traces[SLOW][0].start_time) / 1e9
    assert took == pytest.approx(0.57, abs=0.02)
    offset = int(view.pages["clock_offset_ns"][0])
    assert traces[SLOW][0].start_time == view.rank_steps(0)["begin_ns"][SLOW] + offset
    assert pushed.spans() == ()


def test_the_nodes_of_a_run_make_one_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    look = MonitorSnapshot(run_of(tmp_path / "run", 4, ranks_per_node=2).view())
    (of_first,) = (t for s, t in by_step(Pushed(look, monkeypatch).spans()).items() if s == SLOW)
    other = Pushed(replace(look, node=1, leads=False), monkeypatch).spans()
    assert {s.attributes["rank"] for s in of_first[1:]} == {0, 1} and {s.attributes["rank"] for s in other} == {2, 3}
    root = of_first[0].context
    joined = [s for s in other if s.context.trace_id == root.trace_id]
    assert [s.parent for s in joined if s.name.startswith("rank")] == [root, root]
    assert len({s.context.span_id for s in [*of_first, *joined]}) == len(of_first) + len(joined)


def test_even_steps_are_sampled_only(tmp_path: Path):
    window = run_of(tmp_path / "run", slow=0).view().steps(100)
    assert choose(window, -1) == {FIRST: "sampled"}
    assert choose(window, FIRST) == {}


def test_a_rank_that_takes_no_steps_keeps_nobodys_from_being_pushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = FakeRun(tmp_path / "run", 3)
    run.rank(2)
    for _ in range(STEPS):
        for rank in (0, 1):
            run.rank(rank).step()
    (found,) = by_step(Pushed(MonitorSnapshot(run.view()), monkeypatch).spans()).values()
    assert {span.attributes["rank"] for span in found[1:]} == {0, 1}


def test_what_cannot_be_read_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A run directory without ranks, as at the beginning, and one that is gone."""
    pushed = Pushed(MonitorSnapshot(FakeRun(tmp_path / "empty", 2).view()), monkeypatch)
    assert pushed.spans() == ()
    monkeypatch.undo()

    def gone() -> MonitorSnapshot:
        raise TargetError("it is gone")

    SpanPush(gone, "run", InMemorySpanExporter()).close()


def test_only_where_an_endpoint_takes_traces():
    assert not wanted({}) and not wanted({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:1"})
    assert wanted({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"})
    assert not wanted({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"})


def test_without_opentelemetry(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(DependencyMissing, match=r"dtobs\[otel\]"):
        SpanPush(lambda: pytest.fail("looked"), "run")
