"""What one node tells another: it arrives as it was, bit by bit over time, and nothing else is believed."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtobs.errors import ServiceError
from dtobs.nodes.bundle import Part, decode_bundle, encode_bundle
from dtobs.nodes.mirror import NodeMirror
from dtobs.nodes.sharing import collect
from dtobs.recording.page import PAGE_DTYPE
from dtobs.recording.rundir import RunDirectory
from dtobs.recording.view import load_run
from dtobs.testing.fake_run import FakeRun


@pytest.fixture
def source(tmp_path: Path) -> FakeRun:
    """Node 1 of a run with two ranks a node."""
    run = FakeRun(tmp_path / "there/run", world=4, ranks_per_node=2)
    for number in (2, 3):
        run.rank(number).step().step().collective("all_reduce", wait=True)
    return run


def tell(source: FakeRun, mirror: NodeMirror, *, detail: bool = True) -> int:
    """One question and its answer over the wire; returns its size in bytes."""
    parts = collect(source.directory, 1, mirror.have, exits=mirror.exits, detail=detail)
    body = encode_bundle({"node": 1}, parts)
    head, told = decode_bundle(body)
    assert head["node"] == 1
    mirror.apply(told)
    return len(body)


def same(here: Path, there: Path) -> None:
    ours, theirs = load_run(here), load_run(there)
    assert ours.ranks == theirs.ranks
    assert ours.pages.tobytes() == theirs.pages.tobytes()
    for rank in ours.ranks:
        assert ours.events(rank).tobytes() == theirs.events(rank).tobytes()
        assert ours.rank_steps(rank).tobytes() == theirs.rank_steps(rank).tobytes()
        assert ours.meta(rank) == theirs.meta(rank)


def test_a_node_arrives_as_it_was_and_goes_on(source: FakeRun, tmp_path: Path):
    here = RunDirectory(tmp_path / "here/run")
    mirror = NodeMirror(here, 1)
    first = tell(source, mirror)
    same(here.root, source.directory.root)
    again = tell(source, mirror)
    assert again < first / 2  # only the pages travel when nothing is new
    for _ in range(300):
        source.rank(2).step()
    tell(source, mirror)
    same(here.root, source.directory.root)


def test_without_detail_only_pages_and_entries_travel(source: FakeRun, tmp_path: Path):
    here = RunDirectory(tmp_path / "here/run")
    tell(source, NodeMirror(here, 1), detail=False)
    view = load_run(here.root)
    assert view.ranks == [2, 3]
    assert view.meta(2).process == source.view().meta(2).process
    assert not len(view.events(2))


def test_more_than_travels_at_once_leaves_the_newest(source: FakeRun, tmp_path: Path):
    here = RunDirectory(tmp_path / "here/run")
    mirror = NodeMirror(here, 1)
    tell(source, mirror)
    for _ in range(9000):  # more than the ring holds
        source.rank(2).advance(0.001).event(1)
    tell(source, mirror)
    ours, theirs = load_run(here.root).events(2), load_run(source.directory.root).events(2)
    assert len(ours) >= 4096
    np.testing.assert_array_equal(ours[-4096:], theirs[-4096:])


def test_a_rank_that_attaches_anew_begins_anew(source: FakeRun, tmp_path: Path):
    here = RunDirectory(tmp_path / "here/run")
    mirror = NodeMirror(here, 1)
    tell(source, mirror)
    again = FakeRun(source.directory.root, world=4, ranks_per_node=2, attempt=1)
    again.rank(2).step()
    again.rank(3).step()
    tell(source, mirror)
    assert load_run(here.root).attempt == 1
    same(here.root, source.directory.root)


def test_files_are_private(source: FakeRun, tmp_path: Path):
    here = RunDirectory(tmp_path / "here/run")
    tell(source, NodeMirror(here, 1))
    assert {p.stat().st_mode & 0o077 for p in here.root.rglob("*")} == {0}


def test_a_node_whose_utc_is_wrong_is_set_right(source: FakeRun, tmp_path: Path):
    # Booted an hour before the other node, and an hour fast: by UTC its ranks' last sign of life is in our future.
    for number in (2, 3):
        page = source.rank(number).recorder.page
        page.set(clock_offset_ns=int(page.get("clock_offset_ns")) + 3_600_000_000_000)
        page.commit()
    here = RunDirectory(tmp_path / "here/run")
    parts = collect(source.directory, 1, {}, exits=0, detail=True)
    NodeMirror(here, 1).apply(parts, skew_ns=-3_600_000_000_000)
    ours, theirs = load_run(here.root), load_run(source.directory.root)
    assert ours.ranks == [2, 3]  # the pages have a checksum of their new content
    assert (theirs.pages["clock_offset_ns"] - ours.pages["clock_offset_ns"] == 3_600_000_000_000).all()


class TestHostile:
    """A peer that lies gets nothing written outside of its own ranks, and an error."""

    def parts(self, source: FakeRun) -> list[Part]:
        return collect(source.directory, 1, {}, exits=0, detail=True)

    @pytest.mark.parametrize(
        ("field", "value"),
        [("rank", 4), ("rank", -1), ("rank", 3), ("node", 0), ("attempt", -1), ("attempt", 1)],
    )
    def test_pages_that_are_not_its_own(self, source: FakeRun, tmp_path: Path, field: str, value: int):
        first, *rest = self.parts(source)
        pages = np.frombuffer(first.data, PAGE_DTYPE).copy()
        pages[field][0] = value
        with pytest.raises(ServiceError, match="not its own"):
            NodeMirror(RunDirectory(tmp_path / "here"), 1).apply([replace(first, data=pages.tobytes()), *rest])
        assert not (tmp_path / "here").exists()

    def test_ranks_that_run_here(self, source: FakeRun, tmp_path: Path):
        with pytest.raises(ServiceError, match="not its own"):
            NodeMirror(RunDirectory(tmp_path / "here"), 1).apply(self.parts(source), frozenset({3}))

    def test_parts_of_ranks_that_it_has_not(self, source: FakeRun, tmp_path: Path):
        parts = [replace(part, rank=0) if part.rank == 2 else part for part in self.parts(source)]
        NodeMirror(RunDirectory(tmp_path / "here"), 1).apply(parts)
        assert not (tmp_path / "here/ranks/00000").exists()

    @pytest.mark.parametrize(
        "change", [{"capacity": 1 << 40}, {"capacity": 1}, {"fields": [["stamp", "O"]]}, {"data": b"x" * 65}]
    )
    def test_rings_that_are_none(self, source: FakeRun, tmp_path: Path, change: dict):
        parts = [replace(part, **change) if part.kind == "events" else part for part in self.parts(source)]
        with pytest.raises(ServiceError, match="ring"):
            NodeMirror(RunDirectory(tmp_path / "here"), 1).apply(parts)

    def test_text_beyond_its_bounds(self, source: FakeRun, tmp_path: Path):
        parts = [replace(part, start=1 << 40) if part.kind == "meta" else part for part in self.parts(source)]
        NodeMirror(RunDirectory(tmp_path / "here"), 1).apply(parts)
        assert not any(p.stat().st_size for p in (tmp_path / "here").rglob("meta-*"))

    @given(place=st.integers(0, 20_000), value=st.integers(0, 255))
    def test_a_changed_byte_is_an_error_or_makes_no_difference(self, place: int, value: int):
        body = bytearray(encode_bundle({"node": 1}, [Part("exits", b"x" * 300), Part("meta", b"y" * 900, rank=2)]))
        body[place % len(body)] = value
        with contextlib.suppress(ServiceError):
            _, parts = decode_bundle(bytes(body))
            assert [part.data for part in parts] == [b"x" * 300, b"y" * 900]

    @given(body=st.binary(max_size=200))
    def test_bytes_of_any_kind(self, body: bytes):
        for text in (body, b"DTOBSND1" + body, b"DTOBSND1" + len(body).to_bytes(4, "little") + body):
            with pytest.raises(ServiceError):
                decode_bundle(text)
