"""Samples: disjoint between ranks, one order for all, and a position that outlives a change of world size."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
