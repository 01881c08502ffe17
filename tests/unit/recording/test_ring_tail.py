"""The tail of a ring is the end of the whole ring, however it stands; damage does not change that."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtobs.errors import RecordingError
from dtobs.recording import view as view_module
from dtobs.recording.ring import HEADER_BYTES, EventWriter, read_ring
from dtobs.recording.ring_tail import _AHEAD, read_tail
from dtobs.recording.view import load_run
from dtobs.testing.fake_run import FakeRun

CAPACITY = 2 * _AHEAD + 72


def ring(path: Path, count: int, capacity: int = CAPACITY) -> Path:
    writer = EventWriter(path, capacity)
    for seq in range(1, count + 1):
        writer.write(5, seq=seq)
    writer.close()
    return path


@given(count=st.integers(0, 5 * CAPACITY), last=st.integers(1, 80), newer=st.integers(-5, 2 * CAPACITY))
def test_same_as_the_end(tmp_path_factory: pytest.TempPathFactory, count: int, last: int, newer: int) -> None:
    path = ring(tmp_path_factory.mktemp("tail") / "x.ring", count)
    tail = read_tail(path, last, max(0, count - newer))
    assert tail["seq"].tolist() == list(range(max(1, count - min(last, CAPACITY) + 1), count + 1))
    assert (tail == read_ring(path)[-last:]).all()


@given(
    count=st.integers(1, 3 * CAPACITY),
    last=st.integers(1, 60),
    damage=st.lists(st.tuples(st.integers(0, CAPACITY - 1), st.integers(0, 55), st.integers(1, 255)), max_size=3),
)
def test_damage_is_left_out(
    tmp_path_factory: pytest.TempPathFactory, count: int, last: int, damage: list[tuple[int, int, int]]
) -> None:
    path = ring(tmp_path_factory.mktemp("tail") / "x.ring", count)
    data = bytearray(path.read_bytes())
    for slot, byte, value in damage:
        data[HEADER_BYTES + slot * 64 + byte] ^= value
    path.write_bytes(data)
    whole = set(read_ring(path)["stamp"].tolist())
    tail = read_tail(path, last)["stamp"].tolist()
    assert set(tail) <= whole
    assert tail == sorted(tail)


@given(cut=st.integers(0, HEADER_BYTES + 64 * CAPACITY - 1))
def test_a_cut_ring(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = ring(tmp_path_factory.mktemp("tail") / "x.ring", 2 * CAPACITY + 7)
    path.write_bytes(path.read_bytes()[:cut])
    try:
        whole = read_ring(path)
    except RecordingError:
        with pytest.raises(RecordingError, match=r"x\.ring"):
            read_tail(path, 5)
    else:
        assert (read_tail(path, 5) == whole[-5:]).all()


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"cannot read .*none\.ring: No such file"):
        read_tail(tmp_path / "none.ring", 5)
    with pytest.raises(ValueError, match="must be positive"):
        read_tail(ring(tmp_path / "x.ring", 5), 0)


def test_a_look_goes_on_where_the_earlier_one_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, kept, whole = FakeRun(tmp_path / "run", 2), None, []
    monkeypatch.setattr(view_module, "read_ring", lambda path: whole.append(path) or read_ring(path))
    # Within what is read of the newest, nothing, more than that, more than the ring has.
    for steps, again in ((200, True), (3, False), (0, False), (60, False), (700, True), (4200, True), (1, False)):
        run.steps(steps)
        for rank in run.ranks:
            assert rank.recorder.amend_step(rank.next_step - 9, loss=float(steps))
        fresh = load_run(run.directory.root)
        expected = [(fresh.rank_steps(rank), fresh.events(rank)) for rank in (0, 1)]
        whole.clear()
        kept = load_run(run.directory.root, previous=kept)
        for rank, (steps_of_rank, events) in enumerate(expected):
            assert kept.rank_steps(rank).tobytes() == steps_of_rank.tobytes()
            assert kept.events(rank).tobytes() == events.tobytes()
        assert bool(whole) == again


def test_a_rank_that_attached_anew_is_read_anew(tmp_path: Path) -> None:
    first = load_run(FakeRun(tmp_path, 1).steps(200).directory.root)
    assert (len(first.rank_steps(0)), len(first.events(0)) > 0) == (200, True)
    FakeRun(tmp_path, 1, attempt=1).steps(5)
    assert len(load_run(tmp_path, previous=first).rank_steps(0)) == 5
