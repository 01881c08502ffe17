"""Files cut anywhere, changed in any byte, or made by an enemy: a readable part or one of our errors; never memory."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtobs.codec import DecodeError, decode, encode
from dtobs.errors import RecordingError, TargetError
from dtobs.events import EVENT_DTYPE, STEP_DTYPE
from dtobs.findings import Finding
from dtobs.host.process import ProcessState
from dtobs.host.stacks import parse_stacks
from dtobs.recording.capture import Capture, RankCapture, load_capture
from dtobs.recording.journal import Entry, read_journal
from dtobs.recording.meta import Parameter, read_meta
from dtobs.recording.page import HEADER_BYTES as PAGE_HEADER
from dtobs.recording.page import MAGIC as PAGE_MAGIC
from dtobs.recording.page import PAGE_DTYPE, SLOT_BYTES, PageReader
from dtobs.recording.ring import HEADER_BYTES, MAGIC, EventWriter, RingWriter, describe, read_ring
from dtobs.recording.rundir import read_json
from dtobs.recording.view import load_run
from dtobs.testing.fake_run import FakeRun
from dtobs.timeline.spans import timeline


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> FakeRun:
    """A small run with one of everything."""
    root = tmp_path_factory.mktemp("damage") / "run"
    made = FakeRun(root, 2, live=False).steps(3)
    made.rank(0).parameters(Parameter("w", (2,), "float32", "r")).digests(7).phase("my phase").collective(wait=True)
    stacks = 'Thread 0x1 (most recent call first):\n  File "a.py", line 3 in f\n'
    seen = RankCapture(0, ProcessState(1, alive=True, state="S"), "free", stacks, {"entries": [1]})
    Capture(made.start_ns, "20260101T000000Z", "stall", {0: seen}).save(made.directory.captures / "20260101T000000Z")
    exit_line = encode(ProcessState(made.pid_of(0), alive=False, exit_code=-9))
    made.directory.exits(0).write_text(exit_line + "\n")
    entry = Entry("found", "2026-01-01T00:00:00Z", 1, 0, Finding("straggler", "slow", (1,)))
    made.directory.findings.write_text(json.dumps(entry.to_json()) + "\n")
    return made


@pytest.fixture
def bounded_memory() -> Iterator[None]:
    """At most 1 GiB more address space than now: an allocation by a hostile number fails the test."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (1 << 30), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def look(root: Path) -> None:
    """Read everything that a view offers."""
    view = load_run(root)
    assert isinstance(view.missing_ranks, list)
    for rank in view.ranks:
        view.events(rank), view.rank_steps(rank), view.digests(rank), view.meta(rank), view.process(rank)
    view.steps().field("loss")
    view.groups()
    read_journal(root / "findings.jsonl")
    if view.capture:
        _ = [c.stacks for c in view.capture.ranks.values()]


FILES = (
    "run.json",
    "findings.jsonl",
    "nodes/00000/pages.bin",
    "nodes/00000/exits.jsonl",
    "ranks/00000/events-0.ring",
    "ranks/00000/steps-0.ring",
    "ranks/00000/digests-0.ring",
    "ranks/00000/meta-0.jsonl",
    "captures/20260101T000000Z/capture.json",
    "captures/20260101T000000Z/rank-00000.fr.json",
    "captures/20260101T000000Z/rank-00000.stacks.txt",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
@given(data=st.data())
def test_cut_or_changed_anywhere(run: FakeRun, name: str, data: st.DataObject) -> None:
    path = run.directory.root / name
    whole = path.read_bytes()
    # Most of a ring is empty: damage is looked for where there is something.
    end = min(len(whole), 4096 + 6144)
    at = data.draw(st.integers(0, end - 1))
    if data.draw(st.booleans()):
        changed = whole[:at]
    else:
        value = data.draw(st.integers(0, 255))
        changed = whole[:at] + bytes([value]) + whole[at + 1 :]
    try:
        path.write_bytes(changed)
        look(run.directory.root)
    finally:
        path.write_bytes(whole)


def test_a_cut_ring_gives_what_is_before_the_cut(run: FakeRun, tmp_path: Path) -> None:
    whole = run.directory.events(0, 0).read_bytes()
    everything = read_ring(run.directory.events(0, 0))
    for records in range(len(everything)):
        # Record i lies in slot i; slot 0 is the one that a full ring comes back to.
        cut = tmp_path / "cut.ring"
        cut.write_bytes(whole[: HEADER_BYTES + 64 * (records + 1) + 33])
        assert (read_ring(cut) == everything[:records]).all()


@given(flips=st.lists(st.tuples(st.integers(0, 64 * 40 - 1), st.integers(1, 255)), min_size=1, max_size=4))
def test_a_damaged_record_hides_no_other(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]]
) -> None:
    path = tmp_path_factory.mktemp("flip") / "steps.ring"
    writer = EventWriter(path, 64)
    for seq in range(1, 40):
        writer.write(5, seq=seq)
    writer.close()
    data = bytearray(path.read_bytes())
    hit = set()
    for at, value in flips:
        # In the first 56 bytes: a last stamp alone that still fits its slot cannot be told from a whole record.
        at = at // 64 * 64 + at % 56
        data[HEADER_BYTES + at] ^= value
        hit.add(at // 64)
    path.write_bytes(data)
    seqs = read_ring(path)["seq"][~np.isin(read_ring(path)["stamp"], list(hit))]
    assert seqs.tolist() == [s for s in range(1, 40) if s not in hit]


def _head(magic: bytes, header: bytes, body: bytes = b"") -> bytes:
    return (magic + len(header).to_bytes(4, "little") + header).ljust(HEADER_BYTES, b"\0") + body


def _ring(**changes: Any) -> bytes:
    header = {"schema": 1, "capacity": 8, "fields": describe(EVENT_DTYPE)} | changes
    return _head(MAGIC, json.dumps(header).encode(), bytes(4096))


WIDE = [["stamp", "<u8"], ["x", "<u8", 1 << 40], ["stamp_end", "<u8"]]
HOSTILE_RINGS = {
    "capacity": _ring(capacity=1 << 24),
    "huge capacity": _ring(capacity=1 << 62),
    "infinite": _ring(capacity=float("inf")),
    "negative": _ring(capacity=-1),
    "zero": _ring(capacity=0),
    "text": _ring(capacity="many"),
    "schema": _ring(schema=float("inf")),
    "wide": _ring(fields=WIDE),
    "wider": _ring(fields=[["stamp", "<u8"], ["x", "<u8", 1 << 90], ["stamp_end", "<u8"]]),
    "negative width": _ring(fields=[["stamp", "<u8"], ["x", "<u8", -5], ["stamp_end", "<u8"]]),
    "object": _ring(fields=[["stamp", "<u8"], ["x", "|O"], ["stamp_end", "<u8"]]),
    "twice": _ring(fields=[["stamp", "<u8"], ["stamp", "<u8"], ["stamp_end", "<u8"]]),
    "no stamps": _ring(fields=[["x", "<u8"]]),
    "no fields": _ring(fields=[]),
    "fields": _ring(fields=7),
    "deep": _head(MAGIC, b"[" * 4000),
    "list": _head(MAGIC, b"[]"),
    "long": MAGIC + b"\xff\xff\xff\xff" + b"{",
    "empty": b"",
    "other": b"\x7fELF" + bytes(5000),
}


@pytest.mark.usefixtures("bounded_memory")
@pytest.mark.parametrize("name", HOSTILE_RINGS)
def test_hostile_ring(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.ring"
    path.write_bytes(HOSTILE_RINGS[name])
    with pytest.raises(RecordingError, match=r"x\.ring"):
        read_ring(path)


@pytest.mark.usefixtures("bounded_memory")
@pytest.mark.parametrize("header", [b"[" * 4000, b"[]", b"{}", b'{"schema": Infinity, "fields": []}', b"\xff", b""])
def test_hostile_page_header(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "pages.bin"
    path.write_bytes(_head(PAGE_MAGIC, header))
    with pytest.raises(RecordingError, match=r"pages\.bin"):
        PageReader(path)


@pytest.mark.usefixtures("bounded_memory")
def test_sparse_files_of_a_terabyte(run: FakeRun, tmp_path: Path) -> None:
    for source in (run.directory.pages(0), run.directory.events(0, 0), run.directory.run_json):
        path = tmp_path / "huge"
        with path.open("wb") as file:
            file.write(source.read_bytes()[:8192])
            file.truncate(1 << 40)
        if source == run.directory.pages(0):
            with pytest.raises(RecordingError, match="room for"):
                PageReader(path).read()
        elif source == run.directory.run_json:
            with pytest.raises(TargetError, match="too large"):
                read_json(path)
        else:
            assert len(read_ring(path)) > 0


def test_a_page_file_that_becomes_shorter_while_open(run: FakeRun, tmp_path: Path) -> None:
    path = tmp_path / "pages.bin"
    path.write_bytes(run.directory.pages(0).read_bytes())
    reader = PageReader(path)
    assert len(reader.read()) == 2
    with path.open("r+b") as file:
        file.truncate(PAGE_HEADER + SLOT_BYTES + 5)
    assert len(reader.read()) == 1
    with path.open("r+b") as file:
        file.truncate(0)
    assert len(reader.read()) == 0


@given(text=st.binary(max_size=300))
def test_meta_of_any_bytes(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    path = tmp_path_factory.mktemp("meta") / "meta.jsonl"
    path.write_bytes(text)
    read_meta(path)


@pytest.mark.parametrize(
    "line",
    [
        '{"t":"group","id":1e999,"name":"x","ranks":[1]}',
        '{"t":"group","id":1,"name":"x","ranks":[Infinity]}',
        '{"t":"group","id":1,"name":"x","ranks":5}',
        '{"t":"op","id":1,"op":"x","shapes":[["a"]]}',
        '{"t":"params","params":["w"]}',
        '{"t":"params","params":[{"name":"w","shape":7,"dtype":"f","replica":""}]}',
        '{"t":"site","id":' + "9" * 5000 + ',"file":"f","line":1,"function":"g"}',
        "[" * 100_000,
        "7",
    ],
)
def test_hostile_meta_line_is_counted_and_the_rest_is_read(tmp_path: Path, line: str) -> None:
    path = tmp_path / "meta.jsonl"
    path.write_text(line + '\n{"t":"phase","id":40,"name":"mine"}\n{"t":"from the fut')
    meta = read_meta(path)
    assert meta.phases == {40: "mine"}
    assert meta.damaged == 2


@pytest.mark.parametrize("world", [10**15, "2", None, [1], -4, 1e300, True])
@pytest.mark.usefixtures("bounded_memory")
def test_hostile_world_size(tmp_path: Path, world: object) -> None:
    FakeRun(tmp_path, 2, info={"world_size": world}).steps(1)
    view = load_run(tmp_path)
    assert view.world_size == 2
    assert view.missing_ranks == []


def test_damage_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, 2).steps(1)
    run.directory.run_json.write_text('{"name": "x')
    run.directory.events(1, 0).write_bytes(b"gone")
    (run.directory.captures / "2030").mkdir(parents=True)
    (run.directory.captures / "2030" / "capture.json").write_text("[]")
    view = load_run(tmp_path)
    assert view.ranks == [0, 1]
    assert len(view.events(0)) > 0
    assert len(view.events(1)) == 0
    assert [line.split(" ")[0].removeprefix(str(tmp_path)) for line in view.damaged] == [
        "/run.json",
        "/captures/2030/capture.json",
        "/ranks/00001/events-0.ring",
    ]


def test_what_another_user_keeps_to_themselves_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests may run as root, who may read everything."""
    run = FakeRun(tmp_path, 2).steps(1)
    run.directory.findings.touch()
    assert load_run(tmp_path).damaged == []
    denied = {run.directory.findings, tmp_path / "nodes"}
    monkeypatch.setattr(os, "access", lambda path, mode: path not in denied)
    assert load_run(tmp_path).damaged == [
        f"cannot read {path}: Permission denied, so what it holds is not seen here"
        for path in (run.directory.findings, tmp_path / "nodes")
    ]


def test_a_broken_page_is_named(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, 2).steps(2)
    data = bytearray(run.directory.pages(0).read_bytes())
    for half in range(2):
        data[PAGE_HEADER + SLOT_BYTES + half * SLOT_BYTES // 2 + 100] ^= 1
    run.directory.pages(0).write_bytes(data)
    view = load_run(tmp_path)
    assert view.ranks == [0]
    assert view.damaged == [f"{run.directory.pages(0)}: the page of local rank 1 is broken"]


def test_one_broken_half_falls_back_to_the_other(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, 1).steps(2)
    newest = int(load_run(tmp_path).page(0)["seq"])
    data = bytearray(run.directory.pages(0).read_bytes())
    data[PAGE_HEADER + (newest & 1) * SLOT_BYTES // 2 + PAGE_DTYPE.itemsize - 1] ^= 0xFF
    run.directory.pages(0).write_bytes(data)
    assert int(load_run(tmp_path).page(0)["seq"]) == newest - 1


def test_a_capture_with_a_broken_dump_keeps_the_rest(tmp_path: Path) -> None:
    seen = RankCapture(0, ProcessState(1, alive=True), "free", "", {"entries": []})
    Capture(1, "t", "stall", {0: seen}).save(tmp_path)
    (tmp_path / "rank-00000.fr.json").write_text("{")
    loaded = load_capture(tmp_path)
    assert loaded.ranks[0].flight_recorder is None
    assert "rank-00000.fr.json cannot be read" in loaded.ranks[0].notes[0]


@pytest.mark.parametrize(
    "value", [None, 5, {"pid": "1", "alive": True}, {"pid": [1], "alive": False}, {"alive": True}, {"pid": 1}]
)
def test_a_process_state_of_other_types(value: Any) -> None:
    with pytest.raises(DecodeError):
        decode(ProcessState, value)


@given(text=st.text())
def test_stacks_of_any_text(text: str) -> None:
    parse_stacks(text)
    parse_stacks(f'  File "{text}", line {"9" * 5000} in f\n  g (a.py:{"9" * 5000})')


def test_steps_of_another_version(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, 1).steps(1)

    def rewrite(fields: list[tuple[str, str]]) -> None:
        ring = RingWriter(run.directory.steps(0, 0), np.dtype(fields), 4)
        record = np.zeros((), ring.dtype)
        record["step"] = 7
        ring.append(record)
        ring.close()

    described = [(str(d[0]), str(d[1])) for d in STEP_DTYPE.descr]
    older = [d for d in described if d[0] not in ("loss", "nonfinite", "stamp_end")]
    rewrite([*older, ("new", "<f8"), ("stamp_end", "<u8")])
    view = load_run(tmp_path)
    assert view.rank_steps(0).dtype == STEP_DTYPE
    (step,) = view.rank_steps(0)
    assert (step["step"], step["nonfinite"], view.damaged) == (7, -1, [])
    assert np.isnan(step["loss"]), "what was not recorded then is not measured, not 0"
    rewrite([(n, "<u4" if n == "tokens" else f) for n, f in described])
    view = load_run(tmp_path)
    assert len(view.rank_steps(0)) == len(view.recent_steps(0, 3)) == 0
    assert view.damaged == [
        f"{run.directory.steps(0, 0)}: written by another version of dtobs, 'tokens' is not the same there"
    ]


@pytest.mark.parametrize(
    "line", ['{"event":"found","utc":"t","t_ns":Infinity}', '{"event":"found"}', "[" * 100_000, "7", "\xff"]
)
def test_hostile_journal_line_hides_no_other(tmp_path: Path, line: str) -> None:
    entry = Entry("found", "t", 1, 0, Finding("straggler", "slow", (1,)))
    path = tmp_path / "findings.jsonl"
    path.write_bytes(line.encode("latin-1") + b"\n" + json.dumps(entry.to_json()).encode() + b"\n")
    assert read_journal(path) == [entry]


def test_a_page_of_another_version_is_refused_by_what_differs(tmp_path: Path):
    run = FakeRun(tmp_path, 1).steps(3)
    path = run.directory.pages(0)
    head = path.read_bytes()[:PAGE_HEADER]
    length = int.from_bytes(head[8:12], "little")
    meta = json.loads(head[12 : 12 + length])

    def rewrite(**changed: object) -> list[str]:
        text = json.dumps(meta | changed).encode()
        new = (head[:8] + len(text).to_bytes(4, "little") + text).ljust(PAGE_HEADER, b"\0")
        path.write_bytes(new + path.read_bytes()[PAGE_HEADER:])
        return load_run(tmp_path).damaged

    said = f"{path}: written by another version of dtobs"
    assert rewrite(fields=meta["fields"][:-1]) == [f"{said} (a page has other fields there)"]
    with pytest.raises(TargetError, match=r"it has no finished step .*a page has other fields there"):
        timeline(load_run(tmp_path))
    assert rewrite(schema=meta["schema"] + 1) == [f"{said} (schema {meta['schema'] + 1}, ours is {meta['schema']})"]
