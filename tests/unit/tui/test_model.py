"""What the screen shows of a run: states, figures, findings, and what is not known."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from dtobs.events import RankState
from dtobs.findings import Severity
from dtobs.host.process import ProcessState
from dtobs.testing.fake_run import FakeRun
from dtobs.tui.detail import rank_detail
from dtobs.tui.model import Frame, build_frame
from dtobs.tui.order import KEYS, Order, arrange
from dtobs.tui.rows import RankRow
from tests.unit.tui.scene import SLOW, STUCK, FakeSource, stalled_run, write_findings


def frame_of(run: FakeRun, later: float = 0.5, **processes: ProcessState) -> Frame:
    source = FakeSource(run, later)
    source.processes = {int(k[1:]): p for k, p in processes.items()}
    return source.look()


def row(frame: Frame, rank: int) -> RankRow:
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


def test_the_scene(tmp_path: Path) -> None:
    run = stalled_run(tmp_path / "run")
    write_findings(run)
    frame = frame_of(run, later=42.0)
    assert frame.layout == "replicate 4 × shard 2"
    assert (frame.step, frame.total_steps, frame.hosts) == (1240, 2000, 2)
    assert frame.status_text == "no sign of life for 42 s"
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
    assert [r.rank for r in arrange(frame_of(run).rows, Order(), limit=3)] == [0, SLOW, STUCK]


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
