"""What the screen shows of a run: states, figures, findings, and what is not known."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from dtobs.events import RankState
from dtobs.findings import Finding, Severity
from dtobs.host.process import ProcessState
from dtobs.recording.capture import Capture, RankCapture
from dtobs.recording.journal import Entry
from dtobs.testing.fake_run import FakeRun
from dtobs.tui.curves import drawn_to, plot
from dtobs.tui.detail import rank_detail
from dtobs.tui.model import ScreenFrame, build_frame
from dtobs.tui.order import KEYS, Order, arrange
from dtobs.tui.plain import facts
from dtobs.tui.rows import RankRow
from tests.unit.tui.scene import SLOW, STUCK, FakeSource, stalled_run, write_findings


def frame_of(run: FakeRun, later: float = 0.5, **processes: ProcessState) -> ScreenFrame:
    source = FakeSource(run, later)
    source.processes = {int(k[1:]): p for k, p in processes.items()}
    return source.look()


def row(frame: ScreenFrame, rank: int) -> RankRow:
    return next(r for r in frame.rows if r.rank == rank)


def test_a_healthy_run(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", 4, info={"name": "mine"}).steps(30, loss=3.0, data=0.01)
    frame = frame_of(run)
    assert (frame.name, frame.status, frame.over) == ("mine", "running", False)
    assert (frame.world_size, frame.hosts, frame.step) == (4, 1, 29)
    assert {r.state for r in frame.rows} == {"running"}
    assert not any(r.suspicious for r in frame.rows)
    assert frame.step_seconds == pytest.approx(0.109)
    assert frame.loss_history == (3.0,) * 30
    assert frame.mfu is None
    assert frame.elapsed_seconds == pytest.approx(30 * 0.109 + 0.5)


def test_steps_in_which_nobody_read_the_loss_are_no_gaps_of_its_history(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", 1)
    for step in range(12):
        read = step % 3 == 0
        run.ranks[0].step(loss=math.nan if step == 6 or not read else float(step), losses=int(read))
    assert [round(value) if math.isfinite(value) else None for value in frame_of(run).loss_history] == [0, 3, None, 9]


def test_the_scene(tmp_path: Path) -> None:
    run = stalled_run(tmp_path / "run")
    write_findings(run)
    frame = frame_of(run, later=42.0)
    assert frame.layout == "replicate 4 × shard 2"
    assert (frame.step, frame.total_steps, frame.hosts) == (1240, 2000, 2)
    assert frame.status_text == "standing still for 42 s (a hang after 60 s)"
    assert frame.tokens_per_second == pytest.approx(65536 / frame.step_seconds)  # type: ignore[operator]
    assert frame.mfu == pytest.approx(1.36e13 / frame.step_seconds / 60e12)  # type: ignore[operator]
    assert row(frame, STUCK).state == "loading"
    assert row(frame, STUCK).phase_seconds == pytest.approx(42.5)
    assert row(frame, STUCK).accused == "critical"
    assert row(frame, SLOW).accused == "warning"
    assert row(frame, 0).doing == "waits in all_reduce"
    assert not row(frame, 0).suspicious, "a rank that waits for another is no suspect"
    assert row(frame, SLOW).late_seconds == frame.skew_seconds
    assert frame.skew_seconds == pytest.approx(0.11 * 0.62, rel=0.1)
    assert [f.code for f in frame.findings] == ["stuck-in-dataloader", "straggler"]
    assert frame.findings[0].age_seconds == pytest.approx(42.5)
    assert (frame.count(Severity.CRITICAL), frame.count(Severity.WARNING)) == (1, 1)


def test_states(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", 8)
    for rank in run.ranks[:7]:
        rank.step()
    run.rank(1).page(state=RankState.FAILED)
    run.rank(2).page(state=RankState.CLOSED)
    run.rank(5).collective(wait=True).advance(5)
    run.rank(6).phase("checkpoint").advance(5)
    frame = frame_of(
        run,
        p3=ProcessState(1, alive=True, state="T"),
        p4=ProcessState(1, alive=False, exit_code=-9),
        p2=ProcessState(1, alive=False, exit_code=0),
    )
    assert [r.state for r in frame.rows] == [
        "running",
        "failed",
        "finished",
        "suspended",
        "dead",
        "waiting",
        "running",
        "starting",
    ]
    assert row(frame, 5).doing == "waits in all_reduce"
    assert [r.level for r in frame.rows] == ["ok", "bad", "done", "bad", "bad", "wait", "ok", "ok"]
    assert row(frame, 6).phase == "checkpoint"
    assert row(frame, 7).busy_seconds is None
    assert row(frame, 4).heartbeat_seconds is None


@pytest.mark.parametrize(
    ("states", "status", "text"),
    [
        ((RankState.CLOSED, RankState.CLOSED), "ended", "ended, all ranks finished"),
        ((RankState.CLOSED, RankState.FAILED), "broken", "ended, rank 1 failed"),
        ((RankState.FAILED, RankState.FAILED), "broken", "ended, 2 ranks failed"),
        ((RankState.STARTING, RankState.STARTING), "starting", "starting"),
        ((RankState.RUNNING, RankState.FAILED), "hurt", "rank 1 failed"),
        ((RankState.RUNNING, RankState.RUNNING), "running", "running"),
    ],
)
def test_status(tmp_path: Path, states: tuple[RankState, ...], status: str, text: str) -> None:
    run = FakeRun(tmp_path / "run", 2)
    for rank, state in zip(run.ranks, states, strict=True):
        rank.page(state=state)
    frame = frame_of(run)
    assert (frame.status, frame.status_text) == (status, text)
    assert frame.over == (status in ("ended", "broken"))


def test_hosts_that_count_time_from_elsewhere(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", 2, ranks_per_node=1).steps(5)
    other = run.rank(1)
    hour = 3600 * 10**9
    offset = int(other.recorder.page.get("clock_offset_ns"))
    other.clock_ns -= hour
    other.meta("process", boot_id="of another host")
    other.page(clock_offset_ns=offset + hour, step_begin_ns=other.clock_ns).phase("data")
    source = FakeSource(run, 0.0)
    view = source.view()
    view.now_ns = run.rank(0).clock_ns + 2 * 10**9
    frame = build_frame(view)
    assert row(frame, 1).phase_seconds == pytest.approx(2.0, abs=1.0)
    assert row(frame, 1).heartbeat_seconds == pytest.approx(2.0, abs=1.0)


def test_missing_ranks_and_nothing_at_all(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", 6)
    assert frame_of(run).status == "empty"
    run.rank(1).step()
    run.rank(4).step()
    assert frame_of(run).missing_ranks == (0, 2, 3, 5)


def test_a_loss_that_is_nan_is_shown_and_one_not_said_is_not(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", 3)
    run.rank(0).step()
    run.rank(1).step(loss=math.nan).page(nonfinite_steps=1)
    run.rank(2).step(loss=math.nan)
    frame = frame_of(run)
    assert math.isnan(row(frame, 1).loss or 0)
    assert row(frame, 2).loss is None


def test_json_has_no_nan(tmp_path: Path) -> None:
    run = stalled_run(tmp_path / "run", steps=5)
    run.rank(1).step(loss=math.nan, local_norm=math.inf).page(nonfinite_steps=1)
    write_findings(run)
    value = json.loads(json.dumps(frame_of(run).to_json(), allow_nan=False))
    assert value["schema"] == "dtobs.top/1"
    assert value["rows"][1]["local_norm"] is None
    assert value["rows"][STUCK]["suspicious"] is True
    assert value["findings"][0]["evidence"][0]["what"] == "phase"


def test_every_order_shows_every_rank(tmp_path: Path) -> None:
    rows = frame_of(stalled_run(tmp_path / "run", steps=20)).rows
    order = Order()
    for _ in KEYS:
        order = order.next_key()
        assert sorted(r.rank for r in arrange(rows, order)) == list(range(8))
    assert order == Order()


def test_orders(tmp_path: Path) -> None:
    run = stalled_run(tmp_path / "run", steps=20)
    write_findings(run)
    rows = frame_of(run).rows
    assert [r.rank for r in arrange(rows, Order("rank", reverse=True))] == [7, 6, 5, 4, 3, 2, 1, 0]
    assert arrange(rows, Order("busy"))[0].rank == SLOW
    assert arrange(rows, Order("wait"))[-1].rank == SLOW
    assert arrange(rows, Order("memory"))[0].rank == 7
    assert {r.rank for r in arrange(rows, Order(suspicious_only=True))} == {SLOW, STUCK}
    assert Order("busy").by("busy") == Order("busy", reverse=True)
    assert Order("busy", reverse=True).by("wait") == Order("wait")


def test_past_the_limit_suspects_are_kept(tmp_path: Path) -> None:
    run = stalled_run(tmp_path / "run", steps=20)
    write_findings(run)
    assert [r.rank for r in arrange(frame_of(run).rows, Order(), limit=3)] == [STUCK, SLOW, 0]


def test_unknown_values_come_last_and_nan_first(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", 3)
    run.rank(0)
    run.rank(1).step(local_norm=5.0)
    run.rank(2).step(local_norm=math.nan).page(nonfinite_steps=1)
    assert [r.rank for r in arrange(frame_of(run).rows, Order("norm"))] == [2, 1, 0]


def test_detail(tmp_path: Path) -> None:
    run = stalled_run(tmp_path / "run", steps=30)
    run.rank(0).meta("exception", type="ValueError", message="no", traceback="Traceback …\nValueError: no")
    detail = rank_detail(FakeSource(run).view(), 0)
    facts = dict(detail.facts)
    assert facts["collective"] == "all_reduce(sum, float32[1024])"
    assert facts["group"] == "default #2, ranks 0-7"
    assert facts["call site"] == "train.py:20 in train_step"
    assert facts["phase"] == "backward for 42 s"
    assert facts["blocked"] == "in all_reduce(sum, float32[1024]) #2 of default for 42 s"
    assert detail.steps[0].step == 1149
    assert sum(detail.steps[0].parts.values()) == pytest.approx(detail.steps[0].wall_seconds)
    assert detail.events[0].kind == "wait begin"
    assert detail.events[1].what == "all_reduce #2 in default  train.py:20 in train_step"
    assert detail.exception.endswith("ValueError: no")
    with pytest.raises(KeyError):
        rank_detail(FakeSource(run).view(), 99)


def test_a_standstill_of_a_few_steps_is_said(tmp_path: Path) -> None:
    quick = FakeRun(tmp_path / "quick", 2).steps(20)
    assert frame_of(quick, later=1.0).status_text == "running"
    frame = frame_of(quick, later=21.0)
    assert (frame.status, frame.status_text) == ("quiet", "standing still for 21 s (a hang after 60 s)")
    slow = FakeRun(tmp_path / "slow", 2).steps(20, forward=40.0)
    assert frame_of(slow, later=45.0).status_text == "running"
    saving = FakeRun(tmp_path / "saving", 2).steps(20)
    saving.rank(1).phase("checkpoint")
    assert frame_of(saving, later=21.0).status_text == "in checkpoint for 21 s"


def test_who_died_is_told_from_who_ended_for_it(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", 4).steps(5)
    run.rank(0).meta("exception", type="RuntimeError", message="gloo: Connection closed by peer", t_ns=1)
    run.rank(0).page(state=RankState.FAILED)
    ended = {r: ProcessState(1, alive=False, exit_code=code) for r, code in ((0, 1), (1, -15), (2, -9), (3, -15))}
    frame = build_frame(run.view(later=9, processes=ended))
    assert [(r.doing, r.level) for r in frame.rows] == [
        ("lost a peer", "done"),
        ("terminated", "done"),
        ("dead", "bad"),
        ("terminated", "done"),
    ]
    assert frame.status_text == "ended, rank 2 dead"


def test_an_interrupted_run_is_no_complete_one(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", 2, info={"config": {"run": {"steps": 4000}}}).steps(320)
    for rank in run.ranks:
        rank.page(state=RankState.CLOSED)
    assert frame_of(run).status_text == "ended at step 319 of 4,000"
    interrupted = {r: ProcessState(1, alive=False, exit_code=-2) for r in range(2)}
    for rank in run.ranks:
        rank.page(state=RankState.RUNNING)
    assert build_frame(run.view(processes=interrupted)).status_text == "interrupted at step 319 of 4,000"


@pytest.mark.parametrize(("total", "where"), [(4000, "step 319 of 4,000"), (None, "step 319")])
def test_ranks_that_close_their_sessions_on_ctrl_c_are_interrupted(tmp_path: Path, total: int | None, where: str):
    run = FakeRun(tmp_path / "run", 2, info={"config": {"run": {"steps": total}}}).steps(320)
    for number, rank in enumerate(run.ranks):
        run.directory.signals(number, 0).write_bytes(bytes([2]) + bytes(63))
        rank.close()
    frame = frame_of(run)
    assert [(row.state, row.level) for row in frame.rows] == [("interrupted", "done")] * 2
    assert frame.status_text == f"interrupted at {where}"


def test_a_run_that_did_all_its_steps_has_ended_although_its_launcher_ended_it_then(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", 2, info={"config": {"run": {"steps": 320}}}).steps(320)
    run.directory.signals(1, 0).write_bytes(bytes([15]) + bytes(63))
    for rank in run.ranks:
        rank.close()
    assert frame_of(run).status_text == "ended, all ranks finished"


def test_time_left_and_what_was_cleared(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", 2, info={"config": {"run": {"steps": 120}}}).steps(20)
    entry = Entry(
        "cleared", "2026-11-20T12:00:42+00:00", 165_000_000_000, 0, Finding("rank-stopped", "was", since_ns=1)
    )
    frame = build_frame(run.view(processes={0: ProcessState(1, True), 1: ProcessState(2, True)}), (), (entry,))
    assert frame.remaining_seconds == pytest.approx(100 * (frame.step_seconds or 0))
    assert [(f.code, round(f.age_seconds or 0)) for f in frame.history] == [("rank-stopped", 165)]


def test_those_that_differ_come_first_among_many(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", 100).steps(3)
    for rank in run.ranks:
        if rank.number != 77:
            rank.collective("all_reduce", wait=True)
    frame = frame_of(run, later=5.0)
    assert arrange(frame.rows, Order())[0].rank == 77
    assert [r.rank for r in arrange(frame.rows, Order(suspicious_only=True))] == [77]
    assert frame.counts == "1 × running, 99 × waits in all_reduce"


def test_the_sheet_opens_at_the_users_line(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", 1).steps(1)
    text = """Thread 0x01 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed.py", line 3 in recv
  File "/venv/lib/python3.11/site-packages/torch/c10d.py", line 4 in wrapper
  File "/me/train.py", line 30 in step
"""
    view = run.view()
    seen = RankCapture(0, ProcessState(1, True), stacks_text=text)
    view.capture = Capture(int(view.pages["heartbeat_ns"].max()) + 1, "now", "test", {0: seen})
    assert rank_detail(view, 0).stack == ("… 2 frames of torch (in recv)", "/me/train.py:30 in step")


def test_an_exception_keeps_its_lines(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", 1).steps(1)
    run.rank(0).meta(
        "exception", type="ValueError", message="no", traceback=["Traceback", "  File a", "ValueError: no"]
    )
    assert rank_detail(run.view(), 0).exception == "Traceback\n  File a\nValueError: no"


@pytest.mark.parametrize("values", [(1.0, 2.0, 3.0), (5.0,), (), (1e308, -1e308, 0.0), (float("nan"), 1.0)])
def test_curves_of_anything(values: tuple[float, ...]) -> None:
    lines = plot(values, 10, 3)
    assert [len(line) for line in lines] == [10, 10, 10]
    dots = sum((ord(c) - 0x2800).bit_count() for line in lines for c in line)
    assert dots >= min(1, sum(v == v for v in values))


def test_a_curve_of_few_points_is_a_line() -> None:
    lines = plot((0.0, 1.0, 0.0), 10, 3)
    assert all(any(line[column] != "\u2800" for line in lines) for column in range(10))
    assert plot((0.0, float("nan"), 1.0), 10, 3) == ["⠀" * 9 + "⠈", "⠀" * 10, "⡀" + "⠀" * 9], "and none over a gap"


def test_a_spike_does_not_flatten_a_curve():
    wave = [1.0 + 0.5 * (n % 2) for n in range(200)]
    assert drawn_to([*wave, 900.0]) == pytest.approx(1.5 + 0.5 / 3)
    assert drawn_to(wave) == 1.5
    assert drawn_to([1.0] * 200 + [900.0]) == 900.0, "a step that all else is flat beside"
    assert drawn_to([1.0, 2.0, float("nan"), 900.0]) == 900.0
    assert drawn_to([-1e308, *wave, 1e308]) == 1e308
    lines = plot([*wave, 900.0], 101, 4)
    assert any(cell != "⠀" for cell in lines[1][:50])


def test_what_slowness_costs_is_a_figure_of_the_head(tmp_path: Path):
    run = FakeRun(tmp_path / "run", 4)
    for _ in range(10):
        for rank in run.ranks:
            rank.step(forward=0.23, exposed=0.005) if rank.number == 1 else rank.step(forward=0.03, exposed=0.205)
    frame = build_frame(run.view())
    assert frame.slowdown is not None and frame.slowdown > 1.5
    assert dict(facts(frame))["slowdown"] == f"{frame.slowdown:.2f}"
