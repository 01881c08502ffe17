"""The benchmark against other loops compares the same work."""

from __future__ import annotations

import pytest
import torch

from tests.benchmarks.peers.__main__ import GROUPS, OURS, compare
from tests.benchmarks.peers.measure import Plan, installed, measure, ratio
from tests.harness import run_ranks

SMALL = ("--preset", "debug", "--data.sequence", "32", "--data.batch", "2")


@pytest.mark.parametrize(
    "group", [pytest.param(g, marks=() if "FSDP2" in g else pytest.mark.exhaustive) for g in GROUPS]
)
def test_all_contenders_end_with_the_same_weights(group: str) -> None:
    ranks, peers, layout = GROUPS[group]
    plan = Plan((*installed(peers), *OURS), rounds=2, steps=2, flags=(*SMALL, *layout))
    results = run_ranks(measure, ranks, plan, timeout=240)
    _, turns, weights = results[0].value
    expected = weights.pop("runtime")
    assert set(weights) == set(plan.names) - {"runtime"}
    for name, found in weights.items():
        assert set(found) == set(expected), name
        for parameter, values in found.items():
            torch.testing.assert_close(values, expected[parameter], rtol=1e-3, atol=2e-5, msg=f"{name}: {parameter}")
    rows = compare(group, turns, plan, ranks)
    assert {row["over"] for row in rows} == set(plan.names) - {"runtime + dtobs"}
    assert all(row["cpu"]["value"] > 0 and row["wall"]["value"] > 0 for row in rows)


def test_a_ratio_is_of_sums_and_its_interval_holds_it() -> None:
    found = ratio([1.0, 2.0, 3.0], [1.0, 1.0, 1.0])
    assert found.value == 2.0
    assert 1.0 <= found.low < 2.0 < found.high <= 3.0
