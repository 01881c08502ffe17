"""What must not change a verdict: the order of ranks, and more healthy ranks beside the faulty one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dtobs.detectors.hangs import detect
from dtobs.recording.fake import FakeRun
from dtobs.recording.meta import Op

FAULTS = ("missing", "data", "shape", "none")


def faulty_run(root: Path, world: int, odd: int, fault: str) -> FakeRun:
    run = FakeRun(root, world)
    for _ in range(5):
        for rank in run.ranks:
            rank.step().collective()
    for number, rank in enumerate(run.ranks):
        if number != odd or fault == "none":
            rank.collective(wait=fault != "none")
        elif fault == "shape":
            rank.collective(Op("all_reduce", "sum", ((7,),), ("float32",)), wait=True)
        else:
            rank.phase("data" if fault == "data" else "forward")
    return run


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(world=st.integers(3, 6), odd=st.integers(0, 2), fault=st.sampled_from(FAULTS), seed=st.integers(0, 99))
def test_findings_do_not_depend_on_the_order_of_ranks(tmp_path_factory, world, odd, fault, seed):
    view = faulty_run(tmp_path_factory.mktemp("run"), world, odd, fault).view(
        later=0 if fault == "none" else 61
    )
    shuffled = faulty_run(tmp_path_factory.mktemp("run"), world, odd, fault).view(
        later=0 if fault == "none" else 61
    )
    shuffled.pages = np.random.default_rng(seed).permutation(shuffled.pages)
    del shuffled.ranks  # cached, in the order of the pages
    before, after = detect(view), detect(shuffled)
    assert [(f.code, f.ranks, f.group) for f in before] == [(f.code, f.ranks, f.group) for f in after]
    assert [f.ranks for f in before] == ([] if fault == "none" else [(odd,)])


@pytest.mark.parametrize("fault", ["missing", "data", "shape"])
@pytest.mark.parametrize("world", [3, 64])
def test_more_healthy_ranks_change_nothing(tmp_path, fault, world):
    (finding,) = detect(faulty_run(tmp_path, world, 1, fault).view(later=300))
    assert finding.ranks == (1,)
