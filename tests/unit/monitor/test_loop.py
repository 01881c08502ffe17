"""The loop's decisions, tick by tick, on fake runs: budget, failures, who leads, when it ends."""

from __future__ import annotations

import logging
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dtobs.detectors.comparisons import comparisons_off
from dtobs.detectors.hangs.stall import stall
from dtobs.findings import Confidence, Finding
from dtobs.monitor.address import addresses, announce, withdraw
from dtobs.monitor.lock import NodeLock
from dtobs.monitor.loop import Monitor, Timing
from dtobs.monitor.on_hang import Hang
from dtobs.recording.capture import Capture
from dtobs.recording.journal import read_journal
from dtobs.recording.rundir import RunDirectory
from dtobs.recording.view import RunView, load_run
from dtobs.recording.watched import last_pass
from dtobs.testing.fake_run import FakeRun

DEAD = Finding("rank-dead", "rank 1 is gone", (1,))


def nothing(_: RunView) -> list[Finding]:
    return []


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    made = FakeRun(tmp_path / "run", world=2)
    made.steps(3)
    return made


def moved(run: FakeRun) -> None:
    for rank in run.ranks:
        rank.clock_ns = time.monotonic_ns()
        rank.step()


def test_findings_reach_the_journal_and_the_exporters(run: FakeRun):
    monitor = Monitor(run.directory, 0, detect=lambda _: [DEAD])
    assert monitor.tick() > 0
    assert [e.finding.code for e in read_journal(run.directory.findings)] == ["rank-dead"]
    look = monitor.export()
    assert [f.code for f in look.findings] == ["rank-dead"]
    assert look.totals.count == 6
    assert monitor.stats.passes == 1


def test_a_stall_that_is_older_than_the_monitor_is_looked_into_before_it_is_judged(run: FakeRun):
    captured: list[bool] = []

    def detect(view: RunView) -> list[Finding]:
        captured.append(view.capture is not None)
        return []

    for rank in run.ranks:
        rank.page(hang_timeout_ns=1_000_000)
    while stall(load_run(run.directory.root)) is None:
        time.sleep(0.01)
    monitor = Monitor(run.directory, 0, detect=detect)
    monitor.watchdog.take = lambda view, reason, previous: Capture(view.now_ns, "20261120T120000.000Z", reason)
    assert monitor.tick() > 0
    assert (captured, monitor.stats.captures) == ([True], 1)


def test_a_disagreement_that_was_found_stays_found_when_the_run_then_stands_still(run: FakeRun):
    apart = Finding("collective-mismatch", "different collectives at #37", (0, 1), Confidence.LIKELY)
    seen = [[apart], [replace(apart, early=True)], [replace(apart, early=True)]]
    monitor = Monitor(run.directory, 0, detect=lambda _: seen.pop(0))
    for _ in range(3):
        monitor.detect()
    assert [e.event for e in read_journal(run.directory.findings)] == ["found"]
    assert [f.early for f in monitor.journal.findings] == [False]


def test_ranks_that_stand_still_while_others_go_on_are_captured_once_and_acted_on(tmp_path: Path):
    run = FakeRun(tmp_path / "run", world=4)
    run.steps(3)
    pair = run.group("pair", (2, 3))
    run.rank(2).phase("backward").collective(group=pair, wait=True)
    run.rank(3).phase("forward")
    monitor = Monitor(run.directory, 0)
    takes: list[RunView] = []

    def take(view: RunView, reason: str, previous: Capture | None) -> Capture:
        takes.append(view)
        return Capture(view.now_ns, "20261120T120000.000Z", reason)

    still = [2, 3]
    now = monitor.look

    def look_back() -> RunView:
        view = now()
        for name in ("heartbeat_ns", "step_begin_ns", "attach_ns", "phase_begin_ns", "collective_ns", "wait_since_ns"):
            view.pages[name][still] = np.maximum(view.pages[name][still] - 300 * 10**9, 0)
        return view

    considered: list[Hang | None] = []
    monitor.look = look_back  # type: ignore[method-assign]
    monitor.watchdog.take = take
    monitor.on_hang.consider = lambda found, hang: considered.append(hang) is not None  # type: ignore[method-assign]
    monitor.detect()
    monitor.detect()
    assert [(view.ranks, monitor.watchdog.stalled) for view in takes] == [([2, 3], None)]
    assert [hang.stall.ranks if hang is not None else None for hang in considered] == [(2, 3), (2, 3)]
    still.clear()
    moved(run)
    monitor.detect()
    assert (monitor.watchdog.apart, monitor.watchdog.capture, considered[-1]) == (None, None, None)


def test_a_detector_that_throws_is_counted_and_said_once(run: FakeRun, caplog: pytest.LogCaptureFixture):
    def throws(_: RunView) -> list[Finding]:
        raise ZeroDivisionError("odd data")

    monitor = Monitor(run.directory, 0, detect=throws, timing=Timing(pass_min=0, pass_max=0))
    with caplog.at_level(logging.WARNING, "dtobs.monitor"):
        for _ in range(3):
            assert monitor.tick() > 0
    assert monitor.stats.errors == {"detectors": 3}
    assert [r.message for r in caplog.records] == ["the detectors failed: ZeroDivisionError: odd data"]


def test_a_single_failed_detector_is_counted(run: FakeRun):
    def one_failed(view: RunView) -> list[Finding]:
        view.damaged.append("dtobs.detectors.x failed: KeyError: 1")
        return [DEAD]

    monitor = Monitor(run.directory, 0, detect=one_failed)
    monitor.tick()
    assert monitor.stats.errors == {"detectors": 1}
    assert len(monitor.journal.findings) == 1


def test_passes_keep_their_budget(run: FakeRun):
    def expensive(_: RunView) -> list[Finding]:
        begin = time.process_time()
        while time.process_time() - begin < 0.05:
            pass
        return []

    monitor = Monitor(run.directory, 0, detect=expensive, timing=Timing(pass_min=0, pass_max=1000, budget=0.001))
    for _ in range(5):
        monitor.tick()
    assert monitor.stats.passes == 1  # 0.05 s of work at a thousandth of a core: the next is a minute away


def test_while_a_hang_may_be_over_the_next_pass_comes_soon(run: FakeRun):
    hung = Finding("rank-stopped", "rank 1 is suspended", (1,), since_ns=1)
    timing = Timing(pass_min=0.0, pass_max=1000, budget=1e-9)
    monitor = Monitor(run.directory, 0, detect=lambda _: [hung], timing=timing)
    monitor.tick()
    time.sleep(20 * monitor.stats.pass_seconds)
    monitor.tick()
    assert monitor.stats.passes == 2


def test_the_last_pass_comes_at_once_when_the_ranks_close_and_says_what_it_has_seen(run: FakeRun):
    monitor = Monitor(run.directory, 0, detect=nothing, timing=Timing(pass_min=1000, pass_max=1000))
    monitor.tick()
    assert last_pass(run.directory, 0) is None
    for passes, rank in enumerate(run.ranks, start=2):
        rank.close()
        assert monitor.tick() <= monitor.timing.tick_developing
        seen = last_pass(run.directory, 0)
        assert seen is not None
        assert (seen.whole, monitor.stats.passes) == (passes == 3, passes)


def test_only_the_lowest_node_judges_the_run(tmp_path: Path):
    run = FakeRun(tmp_path / "run", world=4, ranks_per_node=2)
    run.steps(2)
    first = Monitor(run.directory, 0, detect=lambda _: [DEAD])
    second = Monitor(run.directory, 1, detect=lambda _: [DEAD])
    assert (first.leads, second.leads) == (True, False)
    second.tick()
    assert not run.directory.findings.exists()
    assert second.export().findings == []
    first.tick()
    assert len(read_journal(run.directory.findings)) == 1


def test_a_full_disk_keeps_findings_in_memory(run: FakeRun, caplog: pytest.LogCaptureFixture):
    run.directory.findings.mkdir()  # a file cannot be opened here
    monitor = Monitor(run.directory, 0, detect=lambda _: [DEAD])
    with caplog.at_level(logging.WARNING, "dtobs.monitor"):
        monitor.tick()
        monitor.tick()
    assert monitor.export().findings == monitor.journal.findings != []
    assert monitor.stats.errors["journal"] == 2
    assert len([r for r in caplog.records if "kept in memory" in r.message]) == 1


def test_a_damaged_page_file_is_said_and_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    run = RunDirectory(tmp_path)
    run.pages(0).parent.mkdir(parents=True)
    run.pages(0).write_bytes(b"something else" * 1000)
    monitor = Monitor(run, 0, detect=nothing)
    with caplog.at_level(logging.WARNING, "dtobs.monitor"):
        assert monitor.tick() > 0
    assert "is not a dtobs page file" in caplog.text


def test_without_any_rank_it_gives_up(tmp_path: Path):
    (tmp_path / "nodes").mkdir()
    assert Monitor(RunDirectory(tmp_path), 0, detect=nothing).tick() > 0
    assert Monitor(RunDirectory(tmp_path), 0, detect=nothing, timing=Timing(join=0)).tick() < 0


def test_a_run_that_closed_ends_it(run: FakeRun):
    monitor = Monitor(run.directory, 0, detect=nothing, timing=Timing(clean_end=0))
    assert monitor.tick() > 0
    for rank in run.ranks:
        rank.close()
    assert monitor.tick() > 0
    assert monitor.tick() < 0


def test_who_scrapes_sees_the_end(run: FakeRun):
    monitor = Monitor(run.directory, 0, detect=lambda _: [DEAD], timing=Timing(clean_end=0))
    monitor.tick()
    monitor.scrape()
    for rank in run.ranks:
        rank.close()
    monitor.tick()
    assert monitor.tick() > 0  # the last scrape was before the end
    monitor._idle_since -= 30
    monitor.scrape()
    assert monitor.tick() < 0


def test_a_new_attempt_clears_what_was_found(run: FakeRun, tmp_path: Path):
    monitor = Monitor(run.directory, 0, detect=lambda _: [DEAD] if monitor.ranks.attempt == 0 else [])
    monitor.tick()
    again = FakeRun(tmp_path / "run", world=2, attempt=1)
    again.steps(1)
    monitor.tick()
    assert monitor.journal.findings == []
    assert [(e.event, e.attempt) for e in read_journal(run.directory.findings)] == [
        ("found", 0),
        ("cleared", 0),
    ]


def test_the_lock_lets_one_in(tmp_path: Path):
    first, second = NodeLock(tmp_path / "lock"), NodeLock(tmp_path / "lock")
    assert first.acquire()
    assert not second.acquire()
    first.release()
    assert second.acquire()
    second.release()


class TestAddresses:
    def test_nodes_share_the_file(self, tmp_path: Path):
        run = RunDirectory(tmp_path)
        announce(run, 0, "http://127.0.0.1:1")
        announce(run, 1, "http://127.0.0.1:2")
        assert addresses(run) == {0: "http://127.0.0.1:1", 1: "http://127.0.0.1:2"}
        withdraw(run, 0)
        assert addresses(run) == {1: "http://127.0.0.1:2"}
        assert oct(run.monitor_json.stat().st_mode & 0o777) == "0o600"

    def test_a_damaged_file_is_replaced(self, tmp_path: Path):
        run = RunDirectory(tmp_path)
        run.monitor_json.write_text("{")
        announce(run, 0, None)
        assert addresses(run) == {}


def test_a_run_directory_that_is_removed_is_not_made_again(run: FakeRun):
    monitor = Monitor(run.directory, 0, detect=lambda _: [DEAD])
    announce(run.directory, 0, None)
    assert monitor.tick() > 0
    shutil.rmtree(run.directory.root)
    assert monitor.tick() < 0
    monitor.finish()
    with pytest.raises(OSError, match="No such file"):
        withdraw(run.directory, 0)
    assert not run.directory.root.exists()


def test_another_run_in_the_place_of_this_one_is_left_alone(run: FakeRun):
    monitor = Monitor(run.directory, 0, detect=nothing)
    run.directory.root.rename(run.directory.root.with_name("kept"))
    run.directory.root.mkdir()
    assert monitor.tick() < 0
    monitor.finish()
    assert list(run.directory.root.iterdir()) == []


def test_a_monitor_that_was_killed_is_missed(run: FakeRun):
    def missed() -> list[str]:
        return [off.text for off in comparisons_off(load_run(run.directory.root)) if off.check == "monitor"]

    moved(run)
    lock = NodeLock(run.directory.monitor_lock(0))
    assert lock.acquire()
    announce(run.directory, 0, None)
    assert missed() == []
    lock.release()  # as the kernel does for a process that was killed
    (text,) = missed()
    assert text.startswith("no monitor watches node 0 any more, it was killed")
    assert f"dtobs monitor {run.directory.root} --node 0" in text
    for rank in run.ranks:
        rank.close()
    withdraw(run.directory, 0)
    assert missed() == []


def test_a_copy_of_a_run_says_nothing_of_what_its_processes_do_now(tmp_path: Path):
    """The job goes on and records elsewhere: a copy stands still from the moment at which it was made."""
    run = FakeRun(tmp_path / "run", 2).steps(20)

    def seen(root: Path) -> tuple[list[int], bool]:
        view = load_run(root)
        return sorted(view.processes), view.now_ns > int(view.pages["heartbeat_ns"].max())

    assert seen(run.directory.root) == ([0, 1], True)
    assert seen(shutil.copytree(run.directory.root, tmp_path / "copy")) == ([], False)
    moved_away = run.directory.root.rename(tmp_path / "moved")
    assert seen(moved_away) == ([0, 1], True), "ranks go on recording into a folder that has another name now"
