"""Time that does not count towards a stall, second by second on a fake clock."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from dtobs.detectors.hangs.stall import last_movement_ns, stall
from dtobs.host.process import ProcessState, boot_id, waited_for_core_ns
from dtobs.monitor.uncounted_time import Excuses
from dtobs.recording.uncounted_time import Excused, excused_ns, read_excused, write_excused
from dtobs.testing.fake_run import FakeRun

SECOND = 10**9
RUNS = {0: ProcessState(1, alive=True, state="S"), 1: ProcessState(2, alive=True, state="S")}
ONE_STOPPED = RUNS | {1: ProcessState(2, alive=True, state="T")}
ALL_STOPPED = {rank: ProcessState(rank + 1, alive=True, state="T") for rank in RUNS}


class World:
    """A clock, and how long each process has waited for a processor."""

    def __init__(self) -> None:
        self.now_ns = 1000 * SECOND
        self.since_ns = self.now_ns
        self.delays = {pid: {10 * pid + n: 0 for n in range(4)} for pid in (1, 2)}  # of four threads each
        self.excuses = Excuses(lambda: self.now_ns, lambda pid: dict(self.delays.get(pid, {})))
        self.look(RUNS)

    def look(self, processes: dict[int, ProcessState], *, late: float = 0.0) -> float:
        """The loop sleeps a second, wakes `late` seconds after that, and looks: seconds excused."""
        self.excuses.asleep(1.0)
        self.now_ns += round((1 + late) * SECOND)
        self.excuses.awake()
        spans = self.excuses.observe(processes, self.since_ns)
        assert len(spans) < 5
        return excused_ns(spans, self.since_ns, self.now_ns) / SECOND

    def looks(self, processes: dict[int, ProcessState], seconds: int) -> list[float]:
        return [self.look(processes) for _ in range(seconds)]

    def starve(self, pids: Iterable[int], seconds: int, share: float, threads: int = 1) -> list[float]:
        excused = []
        for _ in range(seconds):
            for pid in pids:
                for thread in list(self.delays[pid])[:threads]:
                    self.delays[pid][thread] += round(share * SECOND)
            excused.append(self.look(RUNS))
        return excused


def test_a_hang_has_no_excuse():
    world = World()
    assert set(world.looks(RUNS, 300)) == {0.0}


def test_ranks_that_were_suspended_and_run_again():
    for stopped in (ALL_STOPPED, ONE_STOPPED):
        world = World()
        world.looks(RUNS, 5)
        assert set(world.looks(stopped, 50)) == {0.0}, "a suspended rank is a finding while it is suspended"
        assert world.look(RUNS) == 51.0
        assert world.looks(RUNS, 30)[-1] == 51.0, "what comes after counts again"


def test_what_lies_before_the_last_movement_is_no_excuse():
    world = World()
    world.looks(ALL_STOPPED, 50)
    world.look(RUNS)
    world.since_ns = world.now_ns
    assert world.looks(RUNS, 10) == [0.0] * 10


def test_a_machine_that_stood_still():
    world = World()
    assert world.look(RUNS, late=3600) == 3600.0
    assert world.look(RUNS) == 3600.0


def test_a_monitor_that_is_a_little_late_was_running():
    world = World()
    assert world.look(RUNS, late=1.5) == 0.0


def test_a_rank_that_gets_no_processor():
    world = World()
    assert world.starve([2], 100, share=0.9)[-1] > 85
    world = World()
    assert world.starve([1, 2], 100, share=1.1, threads=4)[-1] > 95, "never more than the time itself"


def test_threads_that_poll_on_a_busy_machine_are_no_excuse():
    """Each gets a core most of the time: as seen on an H100, of the threads of its driver and of NCCL."""
    world = World()
    assert set(world.starve([1, 2], 100, share=0.3, threads=4)) == {0.0}


def test_a_kernel_that_does_not_tell():
    world = World()
    world.delays.clear()
    assert set(world.looks(RUNS, 100)) == {0.0}


def test_wall_clocks_play_no_part(monkeypatch):
    monkeypatch.setattr("time.time", lambda: 0.0)
    monkeypatch.setattr("time.time_ns", lambda: 0)
    world = World()
    assert set(world.looks(RUNS, 10)) == {0.0}


def test_the_kernel_tells_of_this_process():
    delays = waited_for_core_ns(os.getpid())
    assert not delays or delays[os.getpid()] > 0
    assert waited_for_core_ns(5_000_000) == {}


def test_others_who_look_at_the_files_excuse_the_same(tmp_path: Path):
    run = FakeRun(tmp_path / "run").steps(5)
    run.rank(0).collective(wait=True)
    assert stall(run.view(later=90)) is not None
    since = last_movement_ns(run.view())
    path = run.directory.excused(0)
    write_excused(path, boot_id(), [Excused(since, since + 40 * SECOND)])
    assert stall(run.view(later=90)) is None
    write_excused(path, "of another boot", [Excused(since, since + 40 * SECOND)])
    assert stall(run.view(later=90)) is not None
    path.write_text('{"boot_id": "' + boot_id() + '", "spans": [{"begin_ns": 0}]}')
    assert read_excused(path, boot_id()) == ()
