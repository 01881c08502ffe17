"""Jobs whose process group does not come about: who is missing, from files and processes alone."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dtobs.detectors.hangs import detect
from dtobs.diagnose import diagnose, gather
from dtobs.host.process import start_ticks
from dtobs.recording.arrivals import Arrival, arrive, become, note_living, read_arrivals, write_arrival
from dtobs.recording.rundir import RunDirectory
from dtobs.recording.view import load_run
from dtobs.session.early_rendezvous import spawned_rank_raised
from tests.unit.detectors_hangs.trouble import found

WORLD, PATIENCE = 4, 10.0
NOW = 1_700_000_000.0


@pytest.fixture(autouse=True)
def clock_that_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a loaded machine takes, no second passes between an arrival and the look at it."""
    monkeypatch.setattr(
        "dtobs.recording.arrivals.time", SimpleNamespace(time=lambda: NOW, monotonic_ns=lambda: int(NOW * 1e9))
    )


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    directory.write_run({"name": "hangs", "world_size": WORLD})
    return directory


def on_its_way(rank: int, seconds: float) -> Arrival:
    return replace(arrive(rank, WORLD, 0, PATIENCE), began=NOW - seconds, began_ns=int((NOW - seconds) * 1e9))


def waits(rank: int, seconds: float) -> Arrival:
    waiting = become(on_its_way(rank, seconds), "waiting", site="/me/train.py:8 in main")
    return replace(waiting, since=NOW - seconds, since_ns=int((NOW - seconds) * 1e9))


def dead_pid() -> int:
    """The id of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_a_spawned_rank_that_raised_under_a_torch_up_to_2_9(run, monkeypatch):
    """Its parent's exception has the process in `pid`, which was `error_pid` from 2.10 on."""

    class Raised(Exception):
        error_index, pid = 1, 4711

    monkeypatch.setenv("DTOBS_RUN_DIR", str(run.root))
    monkeypatch.setenv("RANK", "0")
    write_arrival(run, replace(waits(0, 5.0), world_size=2))
    spawned_rank_raised(Raised("-- Process 1 terminated\nKeyError: 'rate'"), 2)
    failed = read_arrivals(run.root)[1]
    assert (failed.pid, failed.state, failed.error) == (4711, "failed", "KeyError: 'rate'")


def test_a_clock_that_is_set_while_ranks_wait_makes_nobody_late(run, monkeypatch):
    """UTC of this host jumps by an hour; and another host's clock was an hour behind all along."""
    elsewhere = replace(waits(1, 3605.0), boot_id="of another machine")
    for arrival in (waits(0, 5.0), elsewhere):
        write_arrival(run, arrival)
    for hours in (1, -1, 0):
        clock = SimpleNamespace(time=lambda h=hours: NOW + 3600 * h, monotonic_ns=lambda: int(NOW * 1e9))
        monkeypatch.setattr("dtobs.recording.arrivals.time", clock)
        assert found(load_run(run.root)) == {}


def test_ranks_that_never_started_started_and_ended_are_told_apart(run):
    write_arrival(run, waits(0, 60))
    write_arrival(run, on_its_way(1, 61))
    write_arrival(run, replace(on_its_way(2, 61), pid=dead_pid()))
    (finding,) = found(load_run(run.root)).values()
    assert (finding.code, finding.ranks, finding.confidence) == ("rendezvous-incomplete", (1, 2, 3), "likely")
    assert "ranks 1-3 of 4 are missing at the rendezvous: " in finding.summary
    assert f"rank 1: process {os.getpid()} on " in finding.summary
    assert "started and has not called init_process_group for 61 s" in finding.summary
    assert "ended before it called init_process_group" in finding.summary
    assert "rank 3: never started on " in finding.summary
    assert "while rank 0 has waited 60 s in init_process_group at /me/train.py:8 in main" in finding.summary


def test_diagnose_says_so_of_a_directory_without_any_recording(run):
    for rank in (0, 2, 3):
        write_arrival(run, waits(rank, 60))
    verdict = diagnose(gather(run.root)).verdict
    assert verdict is not None
    assert (verdict.code, verdict.ranks) == ("rendezvous-incomplete", (1,))


def test_a_store_that_timed_out_is_remembered_after_its_process_ended(run):
    waited = replace(become(waits(0, 9), "failed", error="DistStoreError: timed out", waited=90.0), pid=dead_pid())
    write_arrival(run, waited)
    (finding,) = found(load_run(run.root)).values()
    assert finding.ranks == (1, 2, 3)
    assert "rank 0 has waited 90 s in init_process_group at /me/train.py:8 in main and gave up (DistStoreError" in (
        finding.summary
    )


def test_who_was_missing_is_known_after_somebody_has_killed_everybody(run):
    """The one that the others waited for lived as long as they did, and only then "ended before it called"."""
    processes = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    for process, arrival in zip(processes, (waits(0, 60), on_its_way(1, 61)), strict=True):
        write_arrival(run, replace(arrival, pid=process.pid, ticks=start_ticks(process.pid)))
    gone_before = replace(on_its_way(2, 61), pid=dead_pid(), ticks=1)
    write_arrival(run, gone_before)
    note_living(run.root)
    for process in processes:
        process.kill()
        process.wait()
    (finding,) = found(load_run(run.root)).values()
    assert (finding.code, finding.ranks) == ("rendezvous-incomplete", (1, 2, 3))
    assert f"{processes[1].pid} on {gone_before.host} started and has not called init_process_group for 61 s" in (
        finding.summary
    )
    assert f"{gone_before.pid} on {gone_before.host} ended before it called" in finding.summary
    assert "while rank 0 has waited 60 s in init_process_group at /me/train.py:8" in finding.summary


@pytest.mark.parametrize(
    "arrivals",
    [
        lambda: [waits(rank, 15) for rank in (0, 1)],  # hosts start at different speeds
        lambda: [waits(rank, 45) for rank in range(WORLD)],  # all there: the store itself takes its time
        lambda: [become(waits(rank, 60), "met", waited=60.0) for rank in range(WORLD)],
        lambda: [become(waits(0, 60), "met"), waits(1, 60)],  # the group is coming about
        lambda: [on_its_way(rank, 600) for rank in range(WORLD)],  # they read a data set first
        lambda: [replace(waits(0, 600), pid=1, ticks=1)],  # interrupted by its user, nobody knows when
        list,
    ],
    ids=["soon", "all-there", "met", "meeting", "before", "interrupted", "none"],
)
def test_what_is_no_finding(run, arrivals):
    for arrival in arrivals():
        write_arrival(run, arrival)
    assert found(load_run(run.root)) == {}


def test_who_asks_is_told_who_is_missing_before_the_alarm(run):
    write_arrival(run, waits(0, 15))
    write_arrival(run, on_its_way(1, 15))
    view = load_run(run.root)
    assert detect(view) == []
    view.asked = True
    (finding,) = detect(view)
    assert (finding.code, finding.early, finding.confidence) == ("rendezvous-incomplete", True, "possible")
    assert set(finding.ranks) == set(range(1, WORLD))


def test_all_are_there_and_none_gets_through(run):
    for rank in range(WORLD):
        write_arrival(run, replace(waits(rank, 51 + rank), address="10.0.0.1:29500"))
    (finding,) = found(load_run(run.root)).values()
    assert (finding.code, finding.ranks, finding.confidence) == ("rendezvous-incomplete", (), "likely")
    assert finding.summary == (
        "all 4 ranks are in init_process_group at /me/train.py:8 in main, to meet at 10.0.0.1:29500, and none got"
        " through in 51 s"
    )
    assert "dtobs preflight" in finding.next_step
    for rank in range(WORLD):
        write_arrival(run, waits(rank, 15))
    view = load_run(run.root)
    assert detect(view) == []
    view.asked = True
    (early,) = detect(view)
    assert (early.confidence, early.early) == ("possible", True)


def test_that_none_got_through_is_known_after_somebody_has_killed_everybody(run):
    processes = [subprocess.Popen(["sleep", "60"]) for _ in range(WORLD)]
    for rank, process in enumerate(processes):
        write_arrival(run, replace(waits(rank, 25), pid=process.pid, ticks=start_ticks(process.pid)))
    note_living(run.root)
    for process in processes:
        process.kill()
        process.wait()
    (finding,) = found(load_run(run.root)).values()
    assert (finding.code, finding.ranks, finding.confidence) == ("rendezvous-incomplete", (), "likely")
    assert finding.summary.startswith("all 4 ranks were in init_process_group at /me/train.py:8 in main, and none got")


def test_a_run_that_trains_is_not_looked_at_again(training):
    fake = training(2)
    write_arrival(fake.directory, replace(waits(0, 600), world_size=2))
    assert found(fake.view()) == {}


def test_a_crash_before_the_group_was_there_is_the_cause(tmp_path):
    from dtobs.events import RankState
    from dtobs.testing.fake_run import FakeRun

    fake = FakeRun(tmp_path / "run", 2)
    fake.rank(0)
    fake.rank(1).meta("exception", type="OSError", message="no such file", t_ns=fake.rank(1).clock_ns)
    fake.rank(1).close(RankState.FAILED)
    write_arrival(fake.directory, replace(waits(0, 600), world_size=2))
    assert list(found(fake.view(later=1))) == ["uncaught-exception"]


def test_damaged_files_are_left_out(run):
    write_arrival(run, waits(0, 60))
    folder = run.root / "rendezvous" / "0"
    (folder / "00001.json").write_text('{"rank": "x"}')
    (folder / "00002.json").write_bytes(b"\xff\x00")
    (folder / "00003.json").write_text("[1]")
    assert list(read_arrivals(run.root)) == [0]


GONE_UP = "DistStoreError: Timed out after 600 seconds waiting for clients. 3/4 clients joined."
NO_CARD = "RuntimeError: Unable to find address for: eth99"


def failed(rank: int, error: str, alive: bool = False, uncaught: bool = True, asked: bool = True) -> Arrival:
    arrival = waits(rank, 600) if asked else on_its_way(rank, 600)
    arrival = replace(become(arrival, "failed", error=error, uncaught=uncaught), waited=600.0 if asked else 0.0)
    return arrival if alive else replace(arrival, pid=dead_pid())


@pytest.mark.parametrize(
    ("arrivals", "expected"),
    [
        ([failed(1, NO_CARD), *(failed(r, GONE_UP) for r in (0, 2, 3))], [((1,), "certain")]),
        ([failed(1, NO_CARD), *(waits(r, 5) for r in (0, 2, 3))], [((1,), "certain")]),
        ([failed(1, NO_CARD, uncaught=False), *(waits(r, 5) for r in (0, 2, 3))], [((1,), "likely")]),
        ([failed(1, NO_CARD, alive=True, uncaught=False), *(waits(r, 5) for r in (0, 2, 3))], []),  # it may try again
        ([failed(1, "ValueError: x (a.py:2 in f)", asked=False), *(waits(r, 5) for r in (0, 2))], [((1,), "certain")]),
        ([failed(r, f"OSError: eth{r} is down") for r in range(WORLD)], [((0, 1, 2, 3), "certain")]),
        ([failed(r, GONE_UP) for r in range(WORLD)], [((0, 1, 2, 3), "likely")]),  # nobody is missing
        ([failed(r, "KeyboardInterrupt: ", uncaught=False) for r in range(WORLD)], []),
        ([become(failed(1, NO_CARD, alive=True), "met"), *(become(waits(r, 5), "met") for r in (0, 2, 3))], []),
    ],
)
def test_errors_that_end_ranks_on_their_way(run, arrivals, expected):
    for arrival in arrivals:
        write_arrival(run, arrival)
    told = [f for f in detect(load_run(run.root)) if f.code == "uncaught-exception"]
    assert [(f.ranks, f.confidence) for f in told] == expected


def test_who_gave_up_waiting_for_a_missing_rank_is_not_accused(run):
    for rank in (0, 2, 3):
        write_arrival(run, failed(rank, GONE_UP))
    assert {code: finding.ranks for code, finding in found(load_run(run.root)).items()} == {
        "rendezvous-incomplete": (1,)
    }


def test_a_restart_that_fails_on_its_way_is_told_beside_the_end_before_it(training):
    fake = training(2)
    view = fake.view()
    assert detect(view) == []
    for rank in range(2):
        write_arrival(fake.directory, replace(failed(rank, NO_CARD), world_size=2))  # an attempt that was recorded
    assert detect(fake.view()) == []
    for rank in range(2):
        write_arrival(fake.directory, replace(failed(rank, NO_CARD), world_size=2, attempt=1))
    (told,) = detect(fake.view())
    assert told.summary == (
        f"ranks 0 and 1 failed in init_process_group at /me/train.py:8 in main after the restart: {NO_CARD}"
    )
