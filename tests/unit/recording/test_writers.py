"""What writers promise: several threads, a restart in the same directory, no room, no permission."""

from __future__ import annotations

import os
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from dtobs.errors import RecordingDisabled
from dtobs.events import STEP_DTYPE, Kind
from dtobs.host.process import ProcessState
from dtobs.recording.capture import Capture, RankCapture
from dtobs.recording.meta import MetaWriter, read_meta
from dtobs.recording.page import INDEX, PageReader, PageWriter
from dtobs.recording.recorder import Recorder
from dtobs.recording.ring import EventWriter, RingWriter, read_ring
from dtobs.recording.rundir import RunDirectory
from dtobs.recording.view import load_run
from dtobs.testing.fake_run import FakeRun


@pytest.fixture
def hasty_switches() -> Iterator[None]:
    """Threads change as often as the interpreter can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def _together(*work: threading.Thread) -> None:
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()


@pytest.mark.usefixtures("hasty_switches")
def test_threads_write_events(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "events.ring", 4096)

    def write(thread: int) -> None:
        for seq in range(1000):
            writer.write(Kind.POLICY, thread=thread, seq=seq, value=float(seq * thread))

    _together(*[threading.Thread(target=write, args=(n,)) for n in range(4)])
    events = read_ring(tmp_path / "events.ring")
    assert len(events) == 4000
    for thread in range(4):
        mine = events[events["thread"] == thread]
        assert mine["seq"].tolist() == list(range(1000))
        assert (mine["value"] == mine["seq"] * thread).all()


@pytest.mark.usefixtures("hasty_switches")
def test_a_commit_that_meets_another_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "pages.bin"
    page = PageWriter(path, 0)
    reader = PageReader(path)
    stop = threading.Event()

    def heartbeat() -> None:
        while not stop.is_set():
            page.set(rss_bytes=1.0)
            page.commit()

    others = [threading.Thread(target=heartbeat) for _ in range(2)]
    for thread in others:
        thread.start()
    try:
        step = INDEX["step"]
        for number in range(1, 20_000):
            page.ints[step] = number
            page.commit()
        # Nobody may commit our last word for us by chance: the others stop first.
    finally:
        stop.set()
        for thread in others:
            thread.join()
    (read,) = reader.read()
    assert read["step"] == 19_999
    assert reader.torn == []


@pytest.mark.usefixtures("hasty_switches")
def test_every_page_is_whole_while_threads_set_fields(tmp_path: Path) -> None:
    path = tmp_path / "pages.bin"
    page = PageWriter(path, 0)
    page.commit()
    reader = PageReader(path)
    stop = threading.Event()

    def scribble(name: str) -> None:
        index, value = INDEX[name], 0
        while not stop.is_set():
            value += 1
            page.ints[index] = value
            page.commit()

    others = [threading.Thread(target=scribble, args=(n,)) for n in ("step", "phase")]
    for thread in others:
        thread.start()
    try:
        for _ in range(3000):
            assert len(reader.read()) == 1
    finally:
        stop.set()
        for thread in others:
            thread.join()


def test_the_page_of_a_rank_that_has_left_stays_until_the_next_attempt(tmp_path: Path) -> None:
    path = tmp_path / "pages.bin"

    def records(rank: int, attempt: int = 0) -> list[tuple[int, int]]:
        """One device is all that the process sees: it says that it is local rank 0."""
        with closing(PageWriter(path, 0, rank=rank, attempt=attempt)) as page:
            page.set(rank=rank, attempt=attempt)
            page.commit()
        return [(int(page["rank"]), int(page["attempt"])) for page in PageReader(path).read()]

    assert records(2) == [(2, 0)]
    assert records(0) == records(0) == [(2, 0), (0, 0)]
    assert records(1, attempt=1) == [(1, 1), (0, 0)]
    assert records(0, attempt=1) == [(1, 1), (0, 1)]


def test_restart_in_the_same_directory(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, 2).steps(5)
    again = FakeRun(tmp_path, 2, attempt=1)
    again.rank(0).step()
    view = load_run(tmp_path)
    assert (view.attempt, view.ranks, view.missing_ranks) == (1, [0], [1])
    assert view.page(0)["steps_done"] == 1
    assert len(view.rank_steps(0)) == 1
    again.rank(1).step()
    assert load_run(tmp_path).ranks == [0, 1]
    run.rank(0).page(step=77)  # an old rank that still lives writes to its slot: the newer attempt stays in sight
    assert load_run(tmp_path).attempt == 1


def test_a_second_writer_does_not_disturb_the_first(tmp_path: Path) -> None:
    first = RingWriter(tmp_path / "steps.ring", STEP_DTYPE, 64)
    RingWriter(tmp_path / "steps.ring", STEP_DTYPE, 1).close()
    record = np.zeros((), STEP_DTYPE)
    for _ in range(64):
        first.append(record)  # with the file truncated below it, this would be a SIGBUS
    assert len(read_ring(tmp_path / "steps.ring")) == 0


def _full_disk(folder: Path) -> None:
    Recorder(RunDirectory(folder), 0, 1)


def test_no_room_is_one_clear_line(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, hard))
    try:
        with pytest.raises(RecordingDisabled, match=r"^cannot record to .*events-0\.ring: File too large$"):
            _full_disk(tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not _open_files(tmp_path), "a recording that could not be started leaves nothing open"


def _open_files(folder: Path) -> list[str]:
    targets = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            targets.append(str(fd.readlink()))
        except FileNotFoundError:
            continue
    return [t for t in targets if t.startswith(str(folder))]


def test_meta_on_a_full_disk_counts_and_goes_on(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = MetaWriter(tmp_path / "meta.jsonl")
    writer.add("phase", id=40, name="a")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60, hard))
        writer.add("phase", id=41, name="b" * 100)  # goes to disk in part
        writer.add("phase", id=42, name="c")  # not at all
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    writer.add("phase", id=43, name="d")  # there is room again
    writer.close()
    assert writer.dropped == 2
    meta = read_meta(tmp_path / "meta.jsonl")
    assert meta.phases == {40: "a", 43: "d"}
    assert meta.damaged == 1


@pytest.mark.parametrize(
    "start",
    [
        lambda folder: Recorder(RunDirectory(folder), 0, 1),
        lambda folder: PageWriter(folder / "pages.bin", 0),
        lambda folder: EventWriter(folder / "events.ring"),
        lambda folder: MetaWriter(folder / "meta.jsonl"),
        lambda folder: RunDirectory(folder).write_run({}),
        lambda folder: Capture(1, "t", "r", {0: RankCapture(0, ProcessState(1, alive=True))}).save(folder),
    ],
)
def test_a_folder_that_cannot_be_made(tmp_path: Path, start: object) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordingDisabled, match=r"^cannot .*file.*: (Not a directory|File exists)$"):
        start(tmp_path / "file" / "run")  # type: ignore[operator]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to a read-only folder")
def test_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(RecordingDisabled, match="Permission denied"):
        Recorder(RunDirectory(tmp_path / "run"), 0, 1)


def test_meta_of_the_last_look_is_kept_while_it_is_the_same(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, 1).steps(1)
    first = load_run(tmp_path)
    entries = first.meta(0)
    second = load_run(tmp_path, previous=first)
    assert second.meta(0) is entries
    run.rank(0).phase("new phase")
    third = load_run(tmp_path, previous=second)
    assert third.meta(0) is not entries
    assert list(third.meta(0).phases.values()) == ["new phase"]
    FakeRun(tmp_path, 1, attempt=1).rank(0)
    assert load_run(tmp_path, previous=third).meta(0).phases == {}
