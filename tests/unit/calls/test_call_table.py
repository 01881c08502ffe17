"""The table of calls against the plain meaning of what it answers."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dtobs.calls.order import shifts
from dtobs.calls.table import CallTable, begins

ROWS = st.dictionaries(
    st.tuples(st.integers(0, 2), st.integers(1, 5), st.integers(0, 4)),  # group, seq, rank
    st.tuples(st.integers(0, 2), st.integers(-1, 2)),  # op, site
    max_size=40,
)
Made = dict[tuple[int, int, int], tuple[int, int]]


def table_of(made: Made) -> CallTable:
    keys = sorted(made)
    group, seq, rank = (np.array([key[n] for key in keys], np.int64) for n in range(3))
    op, site = (np.array([made[key][n] for key in keys], np.int32) for n in range(2))
    return CallTable(group, seq, rank, op, site, begins(group, seq))


def calls_of(made: Made) -> dict[tuple[int, int], list[int]]:
    calls: dict[tuple[int, int], list[int]] = {}
    for (group, seq, _), (op, _) in sorted(made.items()):
        calls.setdefault((group, seq), []).append(op)
    return calls


@given(ROWS)
def test_calls_that_differ_and_what_most_ranks_called(made: Made) -> None:
    table, calls = table_of(made), calls_of(made)
    differing = [(int(table.group[rows.start]), int(table.seq[rows.start])) for rows in table.differing(table.op)]
    assert differing == [call for call, ops in calls.items() if len(set(ops)) > 1]
    if made:
        usual = [min(counts, key=lambda op: (-counts[op], op)) for counts in map(Counter, calls.values())]
        assert table.usual(table.op).tolist() == usual


@given(ROWS)
def test_rows_and_frontier_of_each_group(made: Made) -> None:
    table = table_of(made)
    for group in range(4):
        seqs = sorted({s for g, s, _ in made if g == group})
        assert table.seqs(group).tolist() == seqs
        assert table.rank[table.rows(group, 2, 3)].tolist() == [
            r for g, s, r in sorted(made) if g == group and s in (2, 3)
        ]
    assert table.issued == {(g, r): max(s for a, s, b in made if (a, b) == (g, r)) for g, _, r in made}


@given(st.lists(st.integers(0, 9), min_size=6, max_size=12, unique=True), st.integers(1, 4))
def test_a_call_more_or_fewer_is_a_shift(sites: list[int], extra: int) -> None:
    theirs = np.array(sites)
    mine = np.concatenate((np.full(extra, 99), theirs))
    assert list(shifts(mine, theirs)) == [(extra, len(sites))]
    assert list(shifts(theirs, mine)) == [(-extra, len(sites))]
    assert list(shifts(theirs, theirs)) == []
