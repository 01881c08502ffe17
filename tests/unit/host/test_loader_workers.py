"""What a data loader's worker processes do, of real loaders: stuck at a line, running, suspended, waiting for work."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dtobs.host.loader_workers import awaited_worker, worker_frames
from dtobs.host.process import read_process
from dtobs.host.stacks import Frame, ThreadStack
from dtobs.integrations.launch import STARTUP
from tests.unit.monitor.children import child

pytestmark = pytest.mark.slow  # processes of its own

NUMBER = int(signal.SIGRTMIN) + 12
LOADS = ThreadStack("", (Frame("/x/torch/utils/data/dataloader.py", 9, "__next__"),))
WAITS = ThreadStack("", (Frame("/x/threading.py", 9, "wait"), Frame("/x/multiprocessing/pool.py", 9, "get")))
# A rank that takes `argv[4]` batches, and a data set that does `argv[3]` when it is asked for item 2.
RANK = """
import faulthandler, threading
stacks = open(sys.argv[1], 'w')
faulthandler.register(int(sys.argv[2]), file=stacks, all_threads=True)
from torch.utils.data import DataLoader
class Items:
    def __len__(self): return 9
    def __getitem__(self, index):
        if index == 2: exec(sys.argv[3])
        return index
loader = iter(DataLoader(Items(), num_workers=int(sys.argv[5]), multiprocessing_context='fork'))
for _ in range(int(sys.argv[4])):
    next(loader)
print('ready', flush=True)
sys.stdin.read() if sys.argv[4] != '2' else next(loader)
"""


def said(tmp_path: Path, does: str, taken: int, *, workers: int = 2, then: Callable[[int], object] = id) -> str:
    file = tmp_path / "stacks.txt"
    with child(RANK, file, NUMBER, does, taken, workers) as rank:
        then(rank.pid)
        for _ in range(100):
            found = awaited_worker(LOADS, rank.pid, NUMBER, file, time.monotonic() + 5)
            if found:
                return found
            time.sleep(0.05)
            if taken != 2:
                break
    return ""


@pytest.mark.parametrize(
    ("does", "how"),
    [
        ("threading.Event().wait()", "is at "),
        ("while True: pass", "runs at "),
        ("time.sleep(99)", "is at "),
    ],
)
def test_the_line_at_which_a_worker_stays(tmp_path: Path, does: str, how: str):
    found = said(tmp_path, does, 2)
    assert found.startswith("its loader's worker ")
    assert f"which {how}" in found
    assert "in __getitem__" in found or "in <module>" in found


def test_what_the_kernel_says_that_it_waits_for(tmp_path: Path):
    assert said(tmp_path, "os.read(os.pipe()[0], 1)", 2).endswith(" and waits for something to come through a pipe")


def test_a_worker_that_is_suspended(tmp_path: Path):
    def suspend(pid: int) -> None:
        worker = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        os.kill(worker, signal.SIGSTOP)
        while not read_process(worker).stopped:
            time.sleep(0.01)

    assert said(tmp_path, "threading.Event().wait()", 2, then=suspend).endswith(", which is suspended")


def test_workers_that_wait_for_work_are_not_blamed(tmp_path: Path):
    assert said(tmp_path, "pass", 9) == ""


def test_a_process_without_workers(tmp_path: Path):
    assert awaited_worker(LOADS, os.getpid(), NUMBER, tmp_path / "none", time.monotonic() + 1) == ""


POOL = """
import faulthandler, multiprocessing, threading
stacks = open(sys.argv[1], 'w')
faulthandler.register(int(sys.argv[2]), file=stacks, all_threads=True)
def work(number):
    if number == 1: threading.Event().wait()
pool = multiprocessing.get_context('fork').Pool(2)
pool.map_async(work, range(2))
print('ready', flush=True)
sys.stdin.read()
"""


def test_the_line_at_which_a_worker_of_a_pool_stays(tmp_path: Path):
    file, found, deadline = tmp_path / "stacks.txt", "", time.monotonic() + 30
    with child(POOL, file, NUMBER) as rank:
        while not found and time.monotonic() < deadline:
            found = awaited_worker(WAITS, rank.pid, NUMBER, file, time.monotonic() + 5)
        assert awaited_worker(None, rank.pid, NUMBER, file, time.monotonic() + 5) == ""
    assert found.startswith("its pool's worker ")
    assert found.endswith(" in work")


ANEW = """
import multiprocessing, pathlib
open(sys.argv[1], 'w').close()
os.mkfifo(sys.argv[1] + '.fifo')
os.environ['PYTHONPATH'], os.environ['DTOBS_STACKS'] = sys.argv[3], sys.argv[2] + ':' + sys.argv[5]
pool = multiprocessing.get_context(sys.argv[4]).Pool(1)
pool.apply_async(pathlib.Path(sys.argv[1] + '.fifo').read_text)
print('ready', flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("method", "there"), [("spawn", True), ("forkserver", True), ("spawn", False)])
def test_a_worker_that_was_started_anew_below_dtobs_run(tmp_path: Path, method: str, there: bool):
    """It inherits no handler: `sitecustomize` gives it one, unless the rank's file is gone."""
    file, found, deadline = tmp_path / "stacks.txt", [], time.monotonic() + (60 if there else 3)
    with child(ANEW, file, NUMBER, STARTUP, method, file if there else tmp_path / "gone" / "file") as rank:
        # One that still imports what it is to do answers as well.
        while not (found and _all_read(found)) and time.monotonic() < deadline:
            found = [frames for pid in _below(rank.pid) if (frames := worker_frames(pid, NUMBER, file, 2))]
    assert bool(found) == there
    assert _all_read(found)


def _all_read(found: list[tuple[Frame, ...]]) -> bool:
    return all("pathlib" in frame.file for frames in found for frame in frames)


def _below(pid: int) -> list[int]:
    """Processes that `pid` has started, and those that they have."""
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        children = [int(each) for task in tasks for each in (task / "children").read_text().split()]
    except OSError:
        return []
    return [*children, *(each for child_ in children for each in _below(child_))]


@pytest.mark.parametrize(("state", "said"), [("D", True), ("S", False)])
def test_a_worker_that_no_signal_reaches_is_told_by_its_state(tmp_path: Path, state: str, said: bool):
    """On a mount that is lost; a process of that number is not there, so nobody could be asked."""
    worker = 2**22 + 7  # beyond the largest number that a process has
    for folder, name, text in (
        ("9/task/9", "children", f"{worker} "),
        (f"{worker}", "comm", "pt_data_worker\n"),
        (f"{worker}", "stat", f"{worker} (pt_data_worker) {state} " + "0 " * 60),
    ):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / name).write_text(text)
    found = awaited_worker(LOADS, 9, NUMBER, tmp_path / "stacks.txt", time.monotonic() + 5, tmp_path)
    told = f"its loader's worker {worker}, which waits for a disk or a network file system"
    assert found == (told if said else "")


def test_who_has_no_time_left_asks_nobody(tmp_path: Path):
    """The stacks of the rank itself are there already, and must not come too late for their capture."""
    with child(RANK, tmp_path / "stacks.txt", NUMBER, "threading.Event().wait()", 2, 2) as rank:
        assert awaited_worker(LOADS, rank.pid, NUMBER, tmp_path / "stacks.txt", time.monotonic() - 0.1) == ""
    assert (tmp_path / "stacks.txt").read_text() == ""
