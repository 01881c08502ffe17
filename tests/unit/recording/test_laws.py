"""The rings of the laws: written, read by a view, left behind by an earlier session, mirrored between nodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dtobs.nodes.bundle import RINGS
from dtobs.nodes.mirror import NodeMirror
from dtobs.nodes.sharing import MOST_RECORDS, collect
from dtobs.recording.laws import LAWS, LEDGER, SKETCHES, Law, Side
from dtobs.recording.ring import MAX_BODY_BYTES
from dtobs.recording.rundir import RunDirectory
from dtobs.testing.fake_run import FakeRun


def sketches(law: Law, step: int, value: float) -> np.ndarray:
    record = np.zeros((), law.dtype)
    record["step"], record["side"], record["scale"], record["value"] = step, Side.FINAL, 1.0, value
    return record


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
def test_a_ring_is_small_and_travels_between_nodes(law: Law):
    assert law.capacity * law.dtype.itemsize < MAX_BODY_BYTES // 16
    assert law.name in RINGS
    assert 0 < MOST_RECORDS[law.name] <= law.capacity


def test_what_was_written_is_read(tmp_path: Path):
    run = FakeRun(tmp_path)
    assert len(run.steps(1).view().law(LEDGER, 0)) == 0
    ring = run.rank(0).recorder.law(LEDGER)
    assert run.rank(0).recorder.law(LEDGER) is ring
    for step in range(5):
        ring.append(sketches(LEDGER, step, step / 2))
    found = run.view().law(LEDGER, 0)
    assert found["step"].tolist() == [0, 1, 2, 3, 4]
    assert found["value"][4].tolist() == [2.0] * SKETCHES
    assert run.view().law(LEDGER, 0, last=2)["step"].tolist() == [3, 4]


def test_a_session_does_not_read_what_the_one_before_left(tmp_path: Path):
    run = FakeRun(tmp_path, 1)
    run.steps(1).rank(0).recorder.law(LEDGER).append(sketches(LEDGER, 1, 1.0))
    again = FakeRun(tmp_path, 1).steps(1)
    assert len(again.view().law(LEDGER, 0)) == 0


def test_a_node_takes_over_what_another_wrote(tmp_path: Path):
    run = FakeRun(tmp_path / "there", 1).steps(1)
    run.rank(0).recorder.law(LEDGER).append(sketches(LEDGER, 7, 1.0))
    here = RunDirectory(tmp_path / "here")
    mirror = NodeMirror(here, 0)
    mirror.apply(collect(run.directory, 0, {}))
    assert here.ring("ledger", 0, 0).read_bytes() == run.directory.ring("ledger", 0, 0).read_bytes()
