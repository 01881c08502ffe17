"""What must not change a verdict: the order of ranks, and more healthy ranks beside the faulty one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dtobs.detectors.hangs import detect
from dtobs.events import Kind
from dtobs.recording.meta import Op
from dtobs.testing.fake_run import FakeRun

FAULTS = ("missing", "data", "shape", "unused", "one-way-link", "none")


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
        elif fault == "unused":
            rank.event(Kind.UNUSED_PARAMETERS, seq=0, value=2.0, step=rank.next_step).phase("validation")
        elif fault == "one-way-link":
            rank.collective(wait=True)
        else:
            rank.phase("data" if fault == "data" else "forward")
    if fault == "one-way-link":  # the others have the result, and wait for this rank in the next call
        for rank in (r for r in run.ranks if r.number != odd):
            rank.collective(wait=True)
    return run


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(world=st.integers(3, 6), odd=st.integers(0, 2), fault=st.sampled_from(FAULTS), seed=st.integers(0, 99))
def test_findings_do_not_depend_on_the_order_of_ranks(tmp_path_factory, world, odd, fault, seed):
    view = faulty_run(tmp_path_factory.mktemp("run"), world, odd, fault).view(later=0 if fault == "none" else 400)
    shuffled = faulty_run(tmp_path_factory.mktemp("run"), world, odd, fault).view(later=0 if fault == "none" else 400)
    shuffled = replace(shuffled, pages=np.random.default_rng(seed).permutation(shuffled.pages))
    before, after = detect(view), detect(shuffled)
    assert [(f.code, f.ranks, f.group) for f in before] == [(f.code, f.ranks, f.group) for f in after]
    assert [f.ranks for f in before] == ([] if fault == "none" else [(odd,)])


@pytest.mark.parametrize("fault", FAULTS[:-1])
@pytest.mark.parametrize("world", [3, 64])
def test_more_healthy_ranks_change_nothing(tmp_path, fault, world):
    (finding,) = detect(faulty_run(tmp_path, world, 1, fault).view(later=400))
    assert finding.ranks == (1,)
