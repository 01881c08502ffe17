"""The parts of the parallelisms that are pure: who owns, who sees what."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.parallel.context import positions
from runtime.parallel.zero1 import owners


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 8))
def test_owners_are_balanced(sizes: list[int], ranks: int) -> None:
    owner = owners(sizes, ranks)
    load = [sum(size for size, rank in zip(sizes, owner, strict=True) if rank == r) for r in range(ranks)]
    assert sum(load) == sum(sizes)
    assert max(load) - min(load) <= max(sizes)
    if len(sizes) >= ranks:
        assert set(owner) == set(range(ranks))


@given(st.integers(1, 6), st.integers(1, 5))
def test_context_ranks_share_a_sequence_and_its_causal_work(ranks: int, chunk: int) -> None:
    sequence = 2 * ranks * chunk
    shares = [positions(sequence, rank, ranks) for rank in range(ranks)]
    assert torch.cat(shares).sort().values.tolist() == list(range(sequence))
    assert len({int(share.sum()) for share in shares}) == 1
