"""The tail of a ring is the end of the whole ring, however it stands; damage does not change that."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtobs.errors import RecordingError
from dtobs.recording.ring import HEADER_BYTES, EventWriter, read_ring
from dtobs.recording.ring_tail import _AHEAD, read_tail

CAPACITY = 2 * _AHEAD + 72


def ring(path: Path, count: int, capacity: int = CAPACITY) -> Path:
    writer = EventWriter(path, capacity)
    for seq in range(1, count + 1):
        writer.write(5, seq=seq)
    writer.close()
    return path


@given(count=st.integers(0, 5 * CAPACITY), last=st.integers(1, 80))
def test_same_as_the_end(tmp_path_factory: pytest.TempPathFactory, count: int, last: int) -> None:
    path = ring(tmp_path_factory.mktemp("tail") / "x.ring", count)
    tail = read_tail(path, last)
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
