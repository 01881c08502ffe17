"""Timelines of a recorded run: spans nest, Chrome traces are whole, pictures say what was asked for."""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from dtobs.cli import main
from dtobs.errors import RecordingDisabled, TargetError
from dtobs.events import Kind, Phase
from dtobs.events import PipelineOp as Op
from dtobs.recording.pipeline_ring import PipelineWriter
from dtobs.recording.plan import Plan
from dtobs.recording.ring import read_ring
from dtobs.testing.fake_run import FakeRun
from dtobs.timeline import picture
from dtobs.timeline.bubble import latest, recent_shares
from dtobs.timeline.chrome import chrome_trace
from dtobs.timeline.pipeline import pipelines, read_steps
from dtobs.timeline.spans import COMPUTE, timeline
from dtobs.tui.model import build_frame
from dtobs.tui.plain import facts
from tests.unit.served import from_afar

MS = 1_000_000
STEPS = 5


def pipeline_run(root: Path) -> FakeRun:
    """GPipe on two ranks, two micro-batches, 2 ms each way; receives overlap, waits lie inside them."""
    run = FakeRun(root, 2, info={"name": "two-stages"})
    plan = Plan("ScheduleGPipe", 2, (0,), 2, (0, 1))
    for rank in run.ranks:
        rank.meta("pipeline", **vars(plan))
    for step in range(STEPS):
        for rank in run.ranks:
            begin, r = rank.clock_ns + MS, rank.number
            for m in range(2):
                forward = begin + 2 * MS * (m + r)
                backward = begin + 2 * MS * (3 + m + (1 - r))
                rank.pipeline(Op.FORWARD, forward, forward + 2 * MS, micro_batch=m)
                rank.pipeline(Op.BACKWARD, backward, backward + 2 * MS, micro_batch=m)
                op = Op.RECV_FORWARD if r else Op.SEND_FORWARD
                rank.pipeline(op, forward - MS // 2 - m * MS, forward, micro_batch=m, peer=1 - r, size=64)
                rank.pipeline(Op.WAIT, forward - 1000, forward, micro_batch=m)
            rank.step(
                step,
                pipeline_begin_ns=begin + 2 * MS * r,
                pipeline_end_ns=begin + 2 * MS * (5 + 1 - r),
                pipeline_compute_ns=8 * MS,
            )
    return run


def test_the_bubble_of_a_recorded_run(tmp_path: Path) -> None:
    view = pipeline_run(tmp_path).view()
    (plan,) = pipelines(view)
    assert [s.step for s in read_steps(view, plan, 2)] == [STEPS - 2, STEPS - 1]
    found = latest(view)
    assert found is not None
    assert (found.step, found.measured, found.replayed) == (
        STEPS - 1,
        pytest.approx(1 / 3),
        pytest.approx(1 / 3),
    )
    assert found.ideal == pytest.approx(1 / 3)
    assert recent_shares(view) == {0: pytest.approx(1 / 3), 1: pytest.approx(1 / 3)}


def test_the_screen_shows_it_also_from_afar(tmp_path: Path) -> None:
    view = pipeline_run(tmp_path).view()
    far = from_afar(view)
    for seen in (view, far):
        frame = build_frame(seen)
        assert (frame.bubble, frame.bubble_ideal) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
        assert ("bubble", "33% (schedule 33%)") in facts(frame)


def test_a_run_without_pipelines_has_no_bubble(tmp_path: Path) -> None:
    view = FakeRun(tmp_path, 2).steps(3).view()
    assert (pipelines(view), recent_shares(view), latest(view)) == ([], {}, None)


def test_a_pipeline_with_a_rank_that_never_recorded_has_none(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, 2)
    run.rank(0).meta("pipeline", **vars(Plan("ScheduleGPipe", 2, (0,), 2, (0, 1)))).step()
    view = run.view()
    assert (recent_shares(view), latest(view)) == ({}, None)


def test_a_damaged_plan_is_none(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, 1)
    run.rank(0).meta("pipeline", schedule="ScheduleGPipe", stages="?").step()
    assert pipelines(run.view()) == []


def test_spans_of_a_track_nest(tmp_path: Path) -> None:
    trace = chrome_trace(timeline(pipeline_run(tmp_path).view(), newest=STEPS))
    tracks = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((round(event["ts"] * 1e3), round(event["dur"] * 1e3)))
    assert len(tracks) >= 8
    for spans in tracks.values():
        stack: list[int] = []
        for begin, length in sorted(spans, key=lambda s: (s[0], -s[1])):
            while stack and stack[-1] <= begin:
                stack.pop()
            assert not stack or begin + length <= stack[-1]
            stack.append(begin + length)
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {"steps", "phases", "compute", "wait", "send forward", "receive forward"} <= names
    assert json.loads(json.dumps(trace)) == trace


def test_steps_can_be_chosen(tmp_path: Path) -> None:
    view = pipeline_run(tmp_path).view()
    chosen = timeline(view, 1, 2)
    assert chosen.steps == (1, 2)
    assert sum(s.track == COMPUTE for s in chosen.spans) == 2 * 2 * 4
    with pytest.raises(TargetError, match=r"it has steps 0 to 4"):
        timeline(view, 90, 95)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "run"
    pipeline_run(root)
    assert main(["timeline", str(root), "--steps", "4", "-o", str(tmp_path / "t.json.gz")]) == 0
    out = capsys.readouterr().out
    assert "two-stages, step 4" in out
    rows = [line for line in out.splitlines() if line.startswith("rank ")]
    assert ["F" in row and "B" in row and "·" in row for row in rows] == [True, True]
    assert "pipeline bubble in step 4 (GPipe): measured 33.3%" in out
    assert json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))["otherData"]["steps"] == [4]
    assert main(["timeline", str(root), "-o", str(tmp_path / "t.svg")]) == 0
    drawn = ElementTree.fromstring((tmp_path / "t.svg").read_text())
    texts = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"forward", "backward"} <= set(texts), "a legend"
    assert texts.count("0 s") == 1 and sum(bool(re.fullmatch(r"[\d.]+ (ms|s)", text or "")) for text in texts) == 7


def test_the_command_draws_phases_without_a_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FakeRun(tmp_path, 2).steps(4)
    assert main(["timeline", str(tmp_path)]) == 0
    assert "f forward, b backward" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "x"], "--steps x: give a step or a range, such as 12 or 10-12"),
        (["--steps", "9-3"], "--steps 9-3: the range ends before it begins"),
        (["-o", "t.png"], "give a name that ends in .json, .json.gz, .svg"),
    ],
)
def test_usage_errors(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_ring_wraps(tmp_path: Path) -> None:
    writer = PipelineWriter(tmp_path / "pipeline.ring", 64)
    for i in range(100):
        writer.write(Op.FORWARD, i, i + 1, 1, i, 3, 1, -1, 0.5)
    writer.close()
    records = read_ring(tmp_path / "pipeline.ring")
    np.testing.assert_array_equal(records["micro_batch"], np.arange(36, 100))
    assert set(records["peer"].tolist()) == {-1}
    assert set(records["stage"].tolist()) == {3}
    assert set(records["bytes"].tolist()) == {0.5}


def test_a_ring_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordingDisabled, match="cannot record to"):
        PipelineWriter(tmp_path / "file" / "pipeline.ring")


def test_a_step_that_hangs_and_one_that_is_not_written_yet_are_drawn_from_events(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, 2)
    for rank in run.ranks:
        rank.step()
        if rank.number == 0:  # its record of step 1 follows in the next forward, which does not come
            rank.event(Kind.STEP_BEGIN, step=1).advance(0.2).event(Kind.STEP_END, step=1).event(Kind.STEP_BEGIN, step=2)
        else:
            rank.step().event(Kind.STEP_BEGIN).event(Kind.PHASE_BEGIN, phase=Phase.BACKWARD)
            rank.event(Kind.WAIT_BEGIN).advance(3.0).event(Kind.POLICY)
    view = run.view()
    late = timeline(view, 1, 1)
    (own,) = (s for s in late.spans if s.track == "steps" and s.rank == 0)
    assert (own.name, own.end_ns - own.begin_ns) == ("step 1", 200 * MS)
    hung = timeline(view, 2, 2)
    assert {(s.rank, s.name) for s in hung.spans} == {(0, "step 2"), (1, "step 2"), (1, "backward"), (1, "wait")}
    assert all(s.end_ns - s.begin_ns == 3000 * MS for s in hung.spans if s.rank == 1)
    shown = picture.text(hung)  # of a rank that waits in its backward pass the waiting is drawn
    assert re.search(r"rank 1 +w+$", shown, re.MULTILINE) and "w waiting for communication" in shown
    assert timeline(view).steps == (0, 1)
    with pytest.raises(TargetError, match="steps 0 to 1; step 2 is in progress"):
        timeline(view, 7, 7)
