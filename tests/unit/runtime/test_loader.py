"""Samples: disjoint between ranks, one order for all, and a position that outlives a change of world size."""

from __future__ import annotations

import subprocess
import sys
import threading
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.data.ahead import ReadAhead
from runtime.data.loader import Batch, ShardedLoader, epoch_order
from runtime.errors import DataError


def loaders(samples: int, ranks: int, batch: int, seed: int = 3, position: int = 0) -> list[ShardedLoader]:
    tokens = np.arange(samples * 4 + 1, dtype=np.uint16)
    made = [
        ShardedLoader(tokens, sequence=4, batch=batch, seed=seed, data_rank=rank, data_ranks=ranks)
        for rank in range(ranks)
    ]
    for loader in made:
        loader.position = position
    return made


def ids(batches: list[Batch]) -> list[int]:
    return [int(number) for batch in batches for number in batch.sample_ids_B]


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 6), st.integers(0, 9), st.integers(1, 8))
def test_all_ranks_together_read_every_sample_once_an_epoch(
    samples: int, ranks: int, batch: int, seed: int, micro_batches: int
) -> None:
    made = loaders(samples, ranks, batch, seed)
    seen = ids([loader.next() for _ in range(micro_batches) for loader in made])
    assert len(set(seen)) == len(seen)
    for epoch in range(max(seen) // samples):
        assert {n - epoch * samples for n in seen if n // samples == epoch} == set(range(samples))


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4), st.integers(1, 6), st.integers(1, 6))
def test_another_world_size_goes_on_where_the_first_stopped(
    samples: int, first_ranks: int, second_ranks: int, before: int, batch: int
) -> None:
    first = loaders(samples, first_ranks, batch)
    seen = ids([loader.next() for _ in range(before) for loader in first])
    second = loaders(samples, second_ranks, batch, position=first[0].position)
    seen += ids([loader.next() for _ in range(5) for loader in second])
    (reference,) = loaders(samples, 1, len(seen))
    assert seen == ids([reference.next()])


def test_windows_and_targets() -> None:
    (loader,) = loaders(samples=5, ranks=1, batch=5)
    batch = loader.next()
    assert batch.inputs_BT.shape == batch.targets_BT.shape == (5, 4)
    assert (batch.targets_BT == batch.inputs_BT + 1).all()
    assert (batch.inputs_BT[:, 0] == batch.sample_ids_B * 4).all()


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    assert (epoch_order(100, 1, 2) == epoch_order(100, 1, 2)).all()
    orders = [tuple(epoch_order(100, seed, epoch)) for seed in (1, 2) for epoch in (0, 1)]
    assert all(a != b for a, b in pairwise(orders))
    assert all(sorted(order) == list(range(100)) for order in orders)


def test_too_short_a_corpus_is_an_error() -> None:
    with pytest.raises(DataError, match="4 tokens are too few for one sample of 4"):
        ShardedLoader(np.arange(4, dtype=np.uint16), sequence=4, batch=1, seed=0)


@given(
    st.integers(1, 30),
    st.integers(1, 12),
    st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 6, 12]), st.integers(1, 4)), min_size=1, max_size=6),
)
def test_any_chain_of_world_sizes_reads_the_same_samples(
    samples: int, share: int, chain: list[tuple[int, int]]
) -> None:
    # The global batch is kept: each world size takes as many micro-batches as make up the same 12 x share samples.
    position, seen = 0, []
    for ranks, steps in chain:
        made = loaders(samples, ranks, batch=1, position=position)
        for _ in range(steps):
            before = len(seen)
            for _ in range(12 * share // ranks):
                seen += ids([loader.next() for loader in made])
            assert len(seen) - before == 12 * share
        (position,) = {loader.position for loader in made}
    (one,) = loaders(samples, 1, batch=len(seen))
    assert seen == ids([one.next()])


def test_the_second_epoch_has_another_order() -> None:
    (loader,) = loaders(samples=50, ranks=1, batch=50)
    first, second = (ids([loader.next()]) for _ in range(2))
    assert [n - 50 for n in second] != first
    assert sorted(n - 50 for n in second) == sorted(first) == list(range(50))


@given(
    st.integers(1, 20),
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.one_of(st.none(), st.integers(0, 40)), max_size=12),
)
def test_reading_ahead_changes_nothing(samples: int, batch: int, ahead: int, moves: list[int | None]) -> None:
    # A move is a micro-batch, or a jump to another position (a resume, a rewind).
    tokens = np.arange(samples * 4 + 1, dtype=np.uint16)
    plain = ShardedLoader(tokens, sequence=4, batch=batch, seed=1)
    reading = ShardedLoader(tokens, sequence=4, batch=batch, seed=1, ahead=ahead)
    for move in moves:
        if move is not None:
            plain.position = reading.position = move
        expected, found = plain.next(), reading.next()
        assert (found.inputs_BT == expected.inputs_BT).all()
        assert (found.targets_BT == expected.targets_BT).all()
        assert ids([found]) == ids([expected])
        assert reading.position == plain.position  # what was read ahead is not consumed


def test_the_next_one_is_read_while_the_caller_works() -> None:
    asked: list[int] = []
    reads = {number: threading.Event() for number in range(0, 100, 10)}

    def read(position: int) -> int:
        asked.append(position)
        reads[position].set()
        return position + 1

    ahead = ReadAhead(read, stride=10, depth=2)
    assert ahead.take(0) == 1
    for position in (10, 20):
        assert reads[position].wait(30)
    assert ahead.take(10) == 11
    assert reads[30].wait(30)
    assert asked == [0, 10, 20, 30]


def test_an_error_of_a_read_ahead_is_raised_where_its_batch_is_taken() -> None:
    def read(position: int) -> int:
        if position == 1:
            raise OSError(5, "Input/output error")
        return position

    ahead = ReadAhead(read, stride=1, depth=1)
    assert ahead.take(0) == 0
    with pytest.raises(OSError, match="Input/output error"):
        ahead.take(1)
    assert ahead.take(2) == 2
    assert ahead.take(0) == 0


def test_a_process_that_reads_ahead_can_end() -> None:
    program = (
        "from runtime.data.ahead import ReadAhead\n"
        "ahead = ReadAhead(lambda n: n, 1, 2)\n"
        "print(ahead.take(0))\n"
        "raise SystemExit(3)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, b"0\n", b"")
