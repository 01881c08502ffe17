"""What is written is what is read: pages, rings, meta entries, run.json, captures."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtobs.errors import RecordingDisabled, RecordingError, TargetError
from dtobs.events import EVENT_DTYPE, EVENT_FORMAT, STEP_DTYPE, Kind, RankState, digest_dtype
from dtobs.host.process import ProcessState
from dtobs.recording.capture import Capture, RankCapture, latest_capture, load_capture
from dtobs.recording.meta import MetaWriter, Parameter, read_meta
from dtobs.recording.page import INDEX, PAGE_DTYPE, PAGE_FLOATS, PAGE_INTS, PageReader, PageWriter
from dtobs.recording.recorder import Recorder
from dtobs.recording.ring import EventWriter, RingWriter, describe, read_ring
from dtobs.recording.rundir import RunDirectory, new_run_path, read_json, write_json
from dtobs.recording.view import load_run
from dtobs.testing.fake_run import FakeRun

INT = st.integers(-(2**63), 2**63 - 1)
FLOAT = st.floats(width=64)


@given(
    ints=st.dictionaries(st.sampled_from(PAGE_INTS), INT),
    floats=st.dictionaries(st.sampled_from(PAGE_FLOATS), FLOAT),
)
def test_page(tmp_path_factory: pytest.TempPathFactory, ints: dict[str, int], floats: dict[str, float]) -> None:
    ints.pop("heartbeat_ns", None)
    path = tmp_path_factory.mktemp("page") / "pages.bin"
    writer = PageWriter(path, 0)
    writer.set(**ints, **floats)
    writer.commit()
    writer.close()
    (page,) = PageReader(path).read()
    for name, value in (ints | floats).items():
        assert page[name] == value or (value != value and np.isnan(page[name]))
    for name in set(PAGE_FLOATS) - set(floats):
        assert np.isnan(page[name]), "what was never said is NaN, not 0"


def test_page_index_is_the_dtype() -> None:
    fields = PAGE_DTYPE.fields
    assert fields is not None
    assert {name: fields[name][1] // 8 for name in INDEX} == INDEX


def test_event_format_is_the_dtype() -> None:
    import struct

    assert struct.calcsize(EVENT_FORMAT) == EVENT_DTYPE.itemsize == 64


@given(count=st.integers(0, 50), capacity=st.integers(1, 20))
def test_ring_keeps_the_newest(tmp_path_factory: pytest.TempPathFactory, count: int, capacity: int) -> None:
    path = tmp_path_factory.mktemp("ring") / "events.ring"
    writer = EventWriter(path, capacity)
    for seq in range(count):
        writer.write(Kind.COLLECTIVE, 3, 7, 1, 2, 3, 4, seq, seq / 2)
    writer.close()
    events = read_ring(path)
    assert events["seq"].tolist() == list(range(max(0, count - capacity), count))
    assert (events["value"] == events["seq"] / 2).all()
    assert events["stamp"].tolist() == [seq + 1 for seq in events["seq"].tolist()]


def test_step_and_digest_rings_describe_themselves(tmp_path: Path) -> None:
    for dtype in (STEP_DTYPE, digest_dtype(5)):
        writer = RingWriter(tmp_path / "some.ring", dtype, 4)
        for step in range(6):
            record = np.zeros((), dtype)
            record["step"] = step
            writer.append(record)
        writer.close()
        records = read_ring(tmp_path / "some.ring")
        assert records.dtype == dtype
        assert records["step"].tolist() == [2, 3, 4, 5]


def test_a_ring_of_a_newer_version_is_refused_with_advice(tmp_path: Path) -> None:
    path = tmp_path / "events.ring"
    EventWriter(path, 4).close()
    data = bytearray(path.read_bytes())
    header = json.dumps({"schema": 99, "capacity": 4, "fields": describe(EVENT_DTYPE)}).encode()
    data[8 : 12 + len(header)] = len(header).to_bytes(4, "little") + header
    path.write_bytes(data)
    with pytest.raises(RecordingError, match=r"schema 99 is newer than this dtobs .*upgrade"):
        read_ring(path)


def test_a_ring_that_no_reader_would_accept_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(RecordingDisabled, match="more than a ring may take"):
        RingWriter(tmp_path / "big.ring", digest_dtype(1 << 20), 1 << 10)


def test_recorder_and_view(tmp_path: Path) -> None:
    recorder = Recorder(RunDirectory(tmp_path / "run"), 3, 4, local_rank=1, node=2)
    recorder.parameters([Parameter("w", (2, 3), "float32", "all"), Parameter("b", (3,), "float32")])
    recorder.digests(9, np.array([2**64 - 1, 5], np.uint64))
    record = np.zeros((), STEP_DTYPE)
    record["step"], record["loss"] = 9, 2.5
    recorder.step(record)
    recorder.close()
    view = load_run(tmp_path / "run")
    assert (view.ranks, view.world_size, view.missing_ranks, view.damaged) == ([3], 4, [0, 1, 2], [])
    assert view.page(3)["state"] == RankState.CLOSED
    assert view.events(3)["kind"].tolist() == [Kind.ATTACH, Kind.CLOSE]
    assert view.rank_steps(3)["loss"].tolist() == [2.5]
    assert view.digests(3)["digest"].tolist() == [[2**64 - 1, 5]]
    assert view.meta(3).params[0] == Parameter("w", (2, 3), "float32", "all")


def test_ranks_that_all_say_local_rank_0_have_a_page_each(tmp_path: Path) -> None:
    """As where each process sees one device only; a restart writes over the page of the one that ended."""
    run = RunDirectory(tmp_path / "run")
    ranks = [Recorder(run, rank, 3, local_rank=0) for rank in range(3)]
    assert load_run(tmp_path / "run").ranks == [0, 1, 2]
    ranks[1].close()
    again = Recorder(run, 1, 3, local_rank=0, attempt=1)
    pages = PageReader(run.pages(0)).read()
    assert [(int(page["rank"]), int(page["attempt"])) for page in pages] == [(0, 0), (1, 1), (2, 0)]
    for recorder in (ranks[0], again, ranks[2]):
        recorder.close()


def test_meta_define_writes_once(tmp_path: Path) -> None:
    writer = MetaWriter(tmp_path / "meta.jsonl")
    for _ in range(3):
        writer.define("site", 5, file="a b.py", line=7, function="é")
    writer.close()
    writer.add("site", id=6, file="late.py", line=1, function="f")
    assert writer.dropped == 1
    meta = read_meta(tmp_path / "meta.jsonl")
    assert str(meta.sites[5]) == "a b.py:7 in é"
    assert list(meta.sites) == [5]


def test_capture(tmp_path: Path) -> None:
    seen = RankCapture(
        1, ProcessState(12, alive=True, state="D"), "held", "Thread 0x1\n", {"entries": []}, ("n",), "a pipe"
    )
    capture = Capture(5, "20261120T120000Z", "stall", {1: seen})
    capture.save(tmp_path / "captures" / "20261120T120000Z")
    (tmp_path / "captures" / "20261121T000000Z").mkdir()  # begun, never finished
    assert latest_capture(tmp_path / "captures") == capture
    with pytest.raises(TargetError, match="holds no finished capture"):
        load_capture(tmp_path / "captures" / "20261121T000000Z")


def test_json_is_replaced_whole(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": 1})
    write_json(tmp_path / "a.json", {"x": [2, None]})
    assert read_json(tmp_path / "a.json") == {"x": [2, None]}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    assert read_json(tmp_path / "none.json") == {}


def test_everything_is_private(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "runs" / "deep" / "run", 2)
    run.rank(0).parameters(Parameter("w", (1,), "float32")).step().digests(1)
    Capture(1, "t", "why", {0: RankCapture(0, ProcessState(1, alive=True), stacks_text="x")}).save(
        run.directory.captures / "t"
    )
    made = [tmp_path / "runs", *(tmp_path / "runs").rglob("*")]
    assert len(made) > 12
    for path in made:
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_run_path_is_safe() -> None:
    assert new_run_path("../a b/c", Path("/base")).parent == Path("/base/runs")
    assert new_run_path("..", Path("/base")).name.endswith("Z-run")


def test_a_restart_with_fewer_ranks_misses_none(tmp_path: Path):
    FakeRun(tmp_path, world=2, info={"attempt": 0}).steps(1)
    again = FakeRun(tmp_path, world=1, attempt=1, info={"attempt": 0, "world_size": 2})
    again.steps(1)
    assert (again.view().world_size, again.view().missing_ranks) == (1, [])
    written = FakeRun(tmp_path, world=3, attempt=2, info={"attempt": 2})
    written.rank(0).step()
    assert written.view().missing_ranks == [1, 2]
