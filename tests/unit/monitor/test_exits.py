"""Deaths are seen at once, with their exit code, whoever waits for the process first."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from dtobs.host.process import parent_of, start_ticks
from dtobs.monitor.exits import ProcessWatch, append_lines
from dtobs.monitor.oom import OomWatch
from tests.unit.monitor.children import WAIT, child


def quiet_oom(tmp_path: Path) -> OomWatch:
    return OomWatch(cgroups=tmp_path / "none", log=tmp_path / "none")


@pytest.fixture
def watch(tmp_path: Path):
    made = ProcessWatch(tmp_path / "exits.jsonl", quiet_oom(tmp_path))
    yield made
    made.close()


def exits(tmp_path: Path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "exits.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("code", "expected"), [("sys.stdin.read(); sys.exit(7)", 7), ("sys.stdin.read(); os.abort()", -6)]
)
def test_exit_code_of_a_zombie(watch: ProcessWatch, tmp_path: Path, code: str, expected: int):
    with child(f"print('ready', flush=True); {code}") as process:
        watch.follow(3, 1, process.pid, start_ticks(process.pid))
        before_ns = time.monotonic_ns()
        assert watch.wait(0) == []
        process.stdin.close()
        ((watched, state),) = watch.wait(30)
        assert (watched.rank, state.alive, state.exit_code) == (3, False, expected)
    (line,) = exits(tmp_path)
    assert (line["rank"], line["attempt"], line["pid"], line["exit_code"]) == (3, 1, process.pid, expected)
    assert line["t_ns"] == line["ended_ns"] > line["alive_ns"] > before_ns


def test_exit_code_after_the_parent_has_waited(watch: ProcessWatch):
    with child(WAIT) as process:
        watch.follow(0, 0, process.pid, start_ticks(process.pid))
        process.send_signal(signal.SIGKILL)
        process.wait()
        ((_, state),) = watch.wait(30)
    # Linux 6.15 and later still know; earlier ones say nothing rather than something wrong.
    kernel = tuple(int(n) for n in os.uname().release.split("-")[0].split(".")[:2])
    assert state.exit_code == -9 if kernel >= (6, 15) else state.exit_code in (None, -9)
    assert not state.alive


def test_who_ended_while_the_monitor_looked_elsewhere_ended_as_it_did(watch: ProcessWatch):
    """As during a capture, which takes seconds: a rank that was told to end is not merely gone."""
    with child(WAIT) as process:
        watched = watch.follow(5, 0, process.pid, start_ticks(process.pid))
        process.send_signal(signal.SIGTERM)
        process.wait()
        seen = watch.states([watched])[5]
        ((_, told),) = watch.wait(30)
    assert not seen.alive
    assert (seen.exit_code, seen.ended_ns > 0) == (told.exit_code, True)


def test_a_process_that_was_gone_before(watch: ProcessWatch, tmp_path: Path):
    with child(WAIT) as process:
        pid, ticks = process.pid, start_ticks(process.pid)
    watched = watch.follow(0, 0, pid, ticks)
    assert not watch.alive(watched)
    assert not (tmp_path / "exits.jsonl").exists()


def test_a_later_process_with_the_same_number_is_not_the_rank(watch: ProcessWatch):
    watched = watch.follow(0, 0, os.getpid(), start_ticks(os.getpid()) - 1)
    assert not watch.alive(watched)
    assert watch.wait(0) == []


def test_following_twice_reports_once_and_a_new_attempt_replaces(watch: ProcessWatch):
    with child(WAIT) as process:
        ticks = start_ticks(process.pid)
        first = watch.follow(0, 0, process.pid, ticks)
        assert watch.follow(0, 0, process.pid, ticks) is first
        watch.follow(0, 1, process.pid, ticks)
        process.stdin.close()
        ((watched, _),) = watch.wait(30)
        assert watched.attempt == 1
        assert watch.wait(0) == []


def test_parent():
    with child(WAIT) as process:
        assert parent_of(process.pid) == os.getpid()
        pid = process.pid
    assert parent_of(pid) == 0


def test_lines_wait_in_memory_while_they_cannot_be_written(tmp_path: Path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    watch = ProcessWatch(blocked / "exits.jsonl", quiet_oom(tmp_path))  # a folder that cannot be made
    with child(WAIT) as process:
        watch.follow(0, 0, process.pid, start_ticks(process.pid))
        process.stdin.close()
        assert len(watch.wait(30)) == 1
    assert not watch.flush()
    watch.exits_path = tmp_path / "exits.jsonl"
    assert watch.flush()
    assert len(exits(tmp_path)) == 1
    watch.close()


def test_a_full_disk_leaves_no_half_line():
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    assert not append_lines(Path("/dev/full"), ["{}\n"])


class TestOom:
    """Control-group counters as the kernel writes them, in a fake tree."""

    def make(self, tmp_path: Path, kills: int) -> Path:
        group = tmp_path / "cg" / "job"
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.events").write_text(f"low 0\noom 1\noom_kill {kills}\n")
        (tmp_path / "proc" / "41").mkdir(parents=True, exist_ok=True)
        (tmp_path / "proc" / "41" / "cgroup").write_text("0::/job\n")
        return group

    def watch(self, tmp_path: Path) -> OomWatch:
        return OomWatch(tmp_path / "proc", tmp_path / "cg", tmp_path / "kmsg")

    def test_counted_kill_explains_one_process(self, tmp_path: Path):
        self.make(tmp_path, 2)
        watch = self.watch(tmp_path)
        watch.follow(41)
        assert not watch.killed(41)
        self.make(tmp_path, 3)
        assert watch.killed(41)
        assert not watch.killed(41)

    def test_kernel_log_names_the_process(self, tmp_path: Path):
        (tmp_path / "kmsg").write_text("6,1,1,-;Memory cgroup out of memory: Killed process 41 (python)\n")
        assert self.watch(tmp_path).killed(41)
        assert not self.watch(tmp_path).killed(4)

    def test_version_1_groups(self, tmp_path: Path):
        base = tmp_path / "cg" / "memory"
        base.mkdir(parents=True)
        (base / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
        (tmp_path / "proc" / "41").mkdir(parents=True)
        (tmp_path / "proc" / "41" / "cgroup").write_text("4:memory:/container/of/host\n0::/\n")
        watch = self.watch(tmp_path)
        watch.follow(41)
        (base / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
        assert watch.killed(41)

    def test_nothing_to_read(self, tmp_path: Path):
        watch = self.watch(tmp_path)
        watch.follow(41)
        assert not watch.killed(41)
