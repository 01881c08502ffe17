"""How long a thread waited for a core, as the kernel counts it."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import pytest

from dtobs.probes.hindrances import Collections, Schedule, Throttled


def test_the_first_two_numbers_are_the_time_on_a_core_and_the_delay(tmp_path: Path):
    (tmp_path / "schedstat").write_text("24483144 188829824 10\n")
    schedule = Schedule(tmp_path / "schedstat")
    assert schedule.read_ns() == (24483144, 188829824)
    schedule.close()
    schedule.close()
    assert schedule.read_ns() == (0, 0)


@pytest.mark.parametrize("text", [None, "", "12", "a b c"])
def test_a_kernel_that_does_not_say(tmp_path: Path, text: str | None):
    if text is not None:
        (tmp_path / "schedstat").write_text(text)
    schedule = Schedule(tmp_path / "schedstat")
    assert (schedule.read_ns(), schedule.read_ns()) == ((0, 0), (0, 0))


def test_it_never_falls():
    schedule = Schedule()
    before = schedule.read_ns()
    until = time.monotonic() + 0.05
    while time.monotonic() < until:
        pass
    on_core, delay = schedule.read_ns()
    assert on_core > before[0] >= 0
    assert delay >= before[1] >= 0
    schedule.close()


def quota(root: Path, text: str, cgroup: str = "0::/job\n", place: str = "sys/fs/cgroup/job") -> Path:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    (root / place).mkdir(parents=True, exist_ok=True)
    (root / place / "cpu.stat").write_text(text)
    return root / place / "cpu.stat"


@pytest.mark.parametrize(
    ("cgroup", "place", "line"),
    [
        ("0::/job\n", "sys/fs/cgroup/job", "usage_usec 7\nthrottled_usec {us}\n"),
        ("4:cpu,cpuacct:/job\n0::/\n", "sys/fs/cgroup/cpu,cpuacct/job", "nr_throttled 3\nthrottled_time {us}000\n"),
        ("0::/elsewhere\n", "sys/fs/cgroup", "throttled_usec {us}\n"),  # in a container the path is the host's
    ],
)
def test_throttling_is_what_came_since_the_last_look(tmp_path: Path, cgroup: str, place: str, line: str):
    path, now = quota(tmp_path, line.format(us=5000), cgroup, place), [0.0]
    throttled = Throttled(tmp_path, lambda: now[0])
    assert throttled.read_ns() == 0
    path.write_text(line.format(us=9000))
    assert throttled.read_ns() == 0, "it is not looked at in every step"
    now[0] = 10.0
    assert throttled.read_ns() == 4_000_000
    throttled.close()


@pytest.mark.parametrize("text", ["", "usage_usec 5\n", "throttled_usec\n", "throttled_usec many\n"])
def test_no_quota_is_no_throttling(tmp_path: Path, text: str):
    quota(tmp_path, text)
    assert Throttled(tmp_path).read_ns() == 0
    assert Throttled(tmp_path / "nothing").read_ns() == 0


def test_collections_are_timed_on_their_thread_and_given_back():
    before = list(gc.callbacks)
    collections = Collections()
    collections.start()
    collections.start()
    gc.collect()
    seen = collections.total_ns
    assert seen > 0
    other = threading.Thread(target=gc.collect)
    other.start()
    other.join()
    assert collections.total_ns == seen
    collections.close()
    assert gc.callbacks == before
