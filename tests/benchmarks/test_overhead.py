"""The benchmark of what observing costs counts every probe, with and without names of hooks."""

from __future__ import annotations

from tests.benchmarks.overhead.__main__ import ratios
from tests.benchmarks.overhead.shares import measure_shares
from tests.benchmarks.overhead.workload import Measured, Plan
from tests.harness import run_ranks


def test_the_shares_of_probes_are_counted():
    plan = Plan(pairs=0, steps=3, batch=1, length=8, levels={}, width=32, layers=1)
    for rank in run_ranks(measure_shares, 2, plan, False):
        found = rank.value
        calls = {probe: calls for probe, (_, calls) in found["us_and_calls"].items()}
        assert calls["optimizer"] >= 1 and calls["gradients"] > 1 and found["hooks_us"] > 0
        assert found["parameters"] == 2 * 2048 * 32 + 13 * 32 * 32 + 2 * 32


def test_a_ratio_is_that_of_the_clock_asked_for():
    blocks = [Measured(True, 3.0, 8.0), Measured(False, 2.0, 4.0)] * 2
    assert ratios(blocks, 10, "cpu")["ratio"] == 1.5
    assert ratios(blocks, 10, "wall") == {
        "ratio": 2.0,
        "ratio_median_of_pairs": 2.0,
        "ratio_5_percent": 2.0,
        "ratio_95_percent": 2.0,
        "plain_wall_ms_per_step": 400.0,
    }
