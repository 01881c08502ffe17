"""The benchmark of logs reads all that it writes, and the logs it writes are healthy."""

from __future__ import annotations

from tests.benchmarks.logs import measure


def test_it_reads_all_ranks_and_finds_nothing():
    found = measure(12, 4000)
    assert (found["ranks"], found["findings"]) == (12, 0)
    assert found["bytes"] >= 12 * 4000
    assert found["seconds_per_gigabyte"] > 0
