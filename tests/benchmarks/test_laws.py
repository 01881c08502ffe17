"""The laws hold for the runtime: exactly where bytes are counted, within bounds where time is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.laws import bubble, memory, traffic
from tests.benchmarks.laws.__main__ import RECOMPUTE
from tests.harness import run_ranks

DEBUG = ("--preset", "debug", "--data.sequence", "32", "--data.batch", "2")


@pytest.mark.exhaustive(one_in=4)
def test_sharding_divides_the_state_and_leaves_the_activations() -> None:
    held = {
        world: [r.value for r in run_ranks(memory.held, world, (*DEBUG, "--parallel.shard", str(world)), timeout=240)]
        for world in (1, 2)
    }
    elements = held[1][0]["elements"]
    for world, ranks in held.items():
        for found in ranks:
            assert found["parameters"] == found["gradients"] == 4 * elements // world
            # AdamW counts its steps too, four bytes a tensor.
            assert 0 <= found["optimizer"] - 8 * elements // world < 1000
            assert found["activations"] == held[1][0]["activations"] > 0
    assert held[1][0]["gathered"] == 0 < held[2][0]["gathered"]


def test_recomputation_saves_activations() -> None:
    full, selective, none = (
        run_ranks(memory.held, 1, (*DEBUG, "--memory.recompute", kind), timeout=240)[0].value["activations"]
        for kind in reversed(RECOMPUTE)
    )
    assert full < 0.3 * none
    assert full < selective < 0.7 * none


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_an_all_reduce_sends_what_the_formula_says(ranks: int) -> None:
    size = 4 * traffic.ELEMENTS
    for result in run_ranks(traffic.measure, ranks):
        sent, formula, recorded = result.value["all-reduce"]
        assert formula == 2 * (ranks - 1) / ranks * size
        assert sent == pytest.approx(formula, rel=0.02)
        assert all(payload == size for _, _, payload in result.value.values())
        assert recorded == size


def test_a_pipeline_without_messages_idles_as_the_formula_says(tmp_path: Path) -> None:
    found = bubble.calmest(tmp_path / "run", "ScheduleGPipe", 2)
    assert found.ideal == 1 / (found.plan.micro_batches + 1)
    assert found.replayed == pytest.approx(found.ideal, abs=0.1)  # durations of a busy machine are not all alike
    assert found.replayed <= found.measured + 1e-9
