"""A process that is at work prints its stack when asked, and goes on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from dtobs.host.loader_workers import worker_frames
from dtobs.host.rank_stacks import by_signal, catches
from dtobs.host.stacks import parse_stacks
from dtobs.probes.stacks import LOOK_SIGNAL, MAIN_SIGNAL, STACKS_SIGNAL
from tests.unit.monitor.children import child

pytestmark = pytest.mark.slow  # processes of its own

# A loader whose two workers are as dtobs leaves them, and a loop that reads it until its input ends.
LOOP = """
import select, time
import torch
from pathlib import Path
from torch.utils.data import DataLoader
from dtobs.probes.loader_workers import LoaderWorkers
class Items:
    def __len__(self): return 10**7
    def __getitem__(self, index):
        time.sleep(0.0005)
        return torch.ones(8)
undo = LoaderWorkers().watch(Path(sys.argv[1]))
open(sys.argv[1], 'w').close()
torch.set_num_threads(1)
loader = iter(DataLoader(Items(), 4, num_workers=2, multiprocessing_context='fork'))
next(loader), next(loader)
print('ready', flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    assert next(loader).shape == (4, 8)
print('whole', flush=True)
"""
SECONDS = 6


def test_workers_at_work_are_asked_thousands_of_times(tmp_path: Path):
    file = tmp_path / "stacks.txt"
    with child(LOOP, file) as rank:
        workers = [int(pid) for pid in Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text().split()]
        workers = [pid for pid in workers if catches(pid, LOOK_SIGNAL)]
        assert len(workers) == 2
        deadline, asked = time.monotonic() + SECONDS, 0
        while time.monotonic() < deadline:
            for worker in workers:
                os.kill(worker, LOOK_SIGNAL)
            asked += 2
            time.sleep(0.0005)
        frames, until = (), time.monotonic() + 30
        while not frames and time.monotonic() < until:  # a worker may be waiting for work
            frames = worker_frames(workers[0], LOOK_SIGNAL, file, 5)
        assert {frame.function for frame in frames} & {"__getitem__", "fetch", "<listcomp>"}
        rank.stdin.close()
        assert rank.stdout.read() == b"whole\n"
    assert asked > 1000
    assert file.read_text().count("most recent call first") > 1000


def test_who_does_not_print_is_not_signalled(tmp_path: Path):
    """A signal without a handler would end it."""
    with child("print('ready', flush=True); sys.stdin.read()") as other:
        assert worker_frames(other.pid, LOOK_SIGNAL, tmp_path / "none", 0.2) == ()
        assert other.poll() is None
    assert LOOK_SIGNAL <= signal.SIGRTMAX


# A process with the handlers of a rank, and a second thread at work whose stack grows and shrinks.
RANK = """
import threading
from pathlib import Path
from types import SimpleNamespace
from dtobs.probes.stacks import Stacks
probe = Stacks()
directory = SimpleNamespace(stacks=lambda *_: Path(sys.argv[1]))
meta = SimpleNamespace(add=lambda *_, **__: None)
recorder = SimpleNamespace(run_dir=directory, rank=0, attempt=0, meta=meta)
probe.context = SimpleNamespace(recorder=recorder, guard=lambda probe, hook, **_: hook)
probe.install()
def deep(n): return n and 1 + deep(n - 1)
def work():
    while True:
        for depth in (5, 50, 200, 400): deep(depth)
threading.Thread(target=work, daemon=True).start()
print('ready', flush=True)
while True: time.sleep(0.01)  # the line
"""


def test_a_rank_at_work_is_asked_for_its_main_thread(tmp_path: Path):
    """Asked for all threads, one signal in some twenty would end it."""
    file = tmp_path / "stacks.txt"
    with child(RANK, file) as rank:
        assert catches(rank.pid, MAIN_SIGNAL) and catches(rank.pid, STACKS_SIGNAL)
        for _ in range(1000):
            os.kill(rank.pid, MAIN_SIGNAL)
            time.sleep(0.0005)
        size = -1
        while size != (
            size := file.stat().st_size
        ):  # a signal that finds the main thread in its handler goes to the other
            time.sleep(0.5)
        said = by_signal(rank.pid, 0, MAIN_SIGNAL, file, 10)
        assert rank.poll() is None
    assert [frame.function for frame in parse_stacks(said)[-1].frames] == ["<module>"]
