"""Whether a run went on after a hang: by a step, or by what every rank did unless somebody ended them."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from dtobs.detectors.hangs.stall import moved_on
from dtobs.testing.fake_run import FakeRun


@pytest.mark.parametrize(
    ("told", "stepped", "expected"), [(False, False, True), (True, False, False), (True, True, True)]
)
def test_phases_left_on_the_way_out_are_no_training(tmp_path: Path, told: bool, stepped: bool, expected: bool) -> None:
    run = FakeRun(tmp_path, 2).steps(4)
    hung_ns = max(rank.clock_ns for rank in run.ranks)
    for rank in run.ranks:
        rank.advance(5.0)
        if stepped:
            rank.step()
        rank.page(phase_begin_ns=rank.clock_ns)
        if told:
            run.directory.signals(rank.number, 0).write_bytes(bytes([signal.SIGINT]))
    assert moved_on(run.view(), hung_ns) is expected
