"""Files of real processes: what two of them write over is seen, and what they share for a reason is not."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dtobs.detectors.silent.shared_files import shared_files
from dtobs.events import Phase
from dtobs.findings import Confidence
from dtobs.monitor.shared_files import SharedFiles
from dtobs.recording.page import PAGE_DTYPE
from dtobs.recording.shared_files import read_shared_files
from dtobs.testing.fake_run import FakeRun

OPEN = """
import os, sys
flags = {"write": os.O_WRONLY, "append": os.O_WRONLY | os.O_APPEND, "update": os.O_RDWR}
fd = os.dup(2) if sys.argv[1] == "copy" else os.open(sys.argv[2], os.O_CREAT | flags[sys.argv[1]], 0o600)
if sys.argv[3] == "some":
    os.write(fd, b"x" * 100)
print("open", flush=True)
sys.stdin.read()
"""


@contextmanager
def writers(*opened: tuple[str, Path], some: str = "some", parent: int = 0) -> Iterator[Any]:
    """One rank for each (mode, path), as the monitor follows them."""
    processes = []
    for mode, path in opened:
        command = [sys.executable, "-c", OPEN, mode, str(path), some]
        with path.open("w") if mode == "copy" else nullcontext() as errors:
            processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors))
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"open\n"
        pages = np.zeros(len(opened), PAGE_DTYPE)
        pages["rank"], pages["step"] = range(len(opened)), 7
        watched = [SimpleNamespace(rank=n, pid=p.pid, parent=parent) for n, p in enumerate(processes)]
        yield SimpleNamespace(pages=pages, watched=watched, attempt=0)
    finally:
        for process in processes:
            process.communicate()


def look(tmp_path: Path, ranks: Any, run: FakeRun) -> list[Any]:
    SharedFiles(run.directory.shared_files(0), run.directory.root).look(ranks)
    return shared_files(run.view())


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path / "run", 2).steps(2)


def test_two_ranks_that_write_one_checkpoint(tmp_path: Path, run: FakeRun):
    path = tmp_path / "step-7.pt"
    with writers(("write", path), ("write", path)) as ranks:
        (one,) = look(tmp_path, ranks, run)
    assert (one.code, one.ranks, one.step, one.confidence) == ("checkpoint-race", (0, 1), 7, Confidence.CERTAIN)
    assert one.summary == f"ranks 0 and 1 write over the same file at the same time: {path}"


def test_a_log_and_what_is_written_in_a_checkpoint(tmp_path: Path, run: FakeRun):
    path = tmp_path / "train.log"
    with writers(("write", path), ("write", path)) as ranks:
        (one,) = look(tmp_path, ranks, run)
    assert one.code == "logging-from-all-ranks"
    other = tmp_path / "state"
    with writers(("write", other), ("write", other)) as ranks:
        ranks.pages["phase"] = Phase.CHECKPOINT
        found = look(tmp_path, ranks, run)
    assert [f.code for f in found] == ["checkpoint-race", "logging-from-all-ranks"]  # the first is still on record


@pytest.mark.parametrize("mode", ["append", "update", "copy"])
def test_appending_copies_of_standard_streams_and_databases_are_quiet(tmp_path: Path, run: FakeRun, mode: str):
    path = tmp_path / "shared"
    with writers((mode, path), (mode, path)) as ranks:
        assert look(tmp_path, ranks, run) == []


def test_a_file_that_got_the_number_of_one_that_is_gone_is_quiet(tmp_path: Path, run: FakeRun):
    first, second = tmp_path / "a.pt", tmp_path / "b.pt"
    first.touch()
    second.hardlink_to(first)  # as it looks to who sees the one before it is gone, and the other after that
    with writers(("write", first), ("write", second)) as ranks:
        assert look(tmp_path, ranks, run) == []


def test_files_of_their_own_and_locks_are_quiet(tmp_path: Path, run: FakeRun):
    with writers(("write", tmp_path / "a.pt"), ("write", tmp_path / "b.pt")) as ranks:
        assert look(tmp_path, ranks, run) == []
    with writers(("write", tmp_path / "lock"), ("write", tmp_path / "lock"), some="") as ranks:
        assert look(tmp_path, ranks, run) == []


@pytest.mark.parametrize(
    ("second", "race"),
    [
        ({"begin_ns": 15, "end_ns": 25}, True),
        ({"begin_ns": 21, "end_ns": 25}, False),  # one after the other
        ({"begin_ns": 15, "end_ns": 25, "inode": 8}, False),
        ({"begin_ns": 15, "end_ns": 25, "device": 2}, False),  # each container has its own
        ({"begin_ns": 15, "end_ns": 25, "path": "/data/other"}, False),  # whose number was free again
    ],
)
def test_two_that_saved_to_one_file_at_one_time(run: FakeRun, second: dict[str, int], race: bool):
    one = {"path": "/data/model", "device": 1, "inode": 7, "step": 3, "begin_ns": 10, "end_ns": 20}
    run.rank(0).meta("written", **one)
    run.rank(1).meta("written", **(one | second))
    found = shared_files(run.view())
    assert [(f.code, f.ranks, f.step) for f in found] == ([("checkpoint-race", (0, 1), 3)] if race else [])


def test_what_the_launcher_holds_open_was_handed_down(tmp_path: Path, run: FakeRun):
    path = tmp_path / "all.log"
    with path.open("w") as held, writers(("write", path), ("write", path), parent=os.getpid()) as ranks:
        held.write("x")
        assert look(tmp_path, ranks, run) == []


def test_what_a_launcher_with_thousands_of_open_files_holds_was_handed_down(tmp_path: Path, run: FakeRun):
    path = tmp_path / "all.log"
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2000:
        pytest.skip("no process may open so many files here")
    other = os.open(tmp_path, os.O_RDONLY)
    many = [os.dup(other) for _ in range(1100)]
    try:
        with path.open("w"), writers(("write", path), ("write", path), parent=os.getpid()) as ranks:
            assert look(tmp_path, ranks, run) == []
    finally:
        for fd in (other, *many):
            os.close(fd)


def test_a_damaged_file_is_nothing(tmp_path: Path):
    path = tmp_path / "shared-files.json"
    for text in ("", "{", '{"files": 3}', '{"files": [{"path": 1}]}', "[]"):
        path.write_text(text)
        assert read_shared_files(path) == ()


def test_a_young_job_is_looked_at_more_often(monkeypatch: pytest.MonkeyPatch, run: FakeRun):
    files = SharedFiles(run.directory.shared_files(0), run.directory.root)
    ranks = SimpleNamespace(pages=np.zeros(2, PAGE_DTYPE), watched=[None, None], attempt=0)
    looks: list[float] = []
    for now in range(60):
        monkeypatch.setattr("dtobs.monitor.shared_files.time.monotonic", lambda now=now: float(now))
        monkeypatch.setattr(files, "_shared", lambda _, now=now: looks.append(now) or {})
        files.look(ranks)
    assert looks == [0, 1, 3, 7, 15, 25, 35, 45, 55]
