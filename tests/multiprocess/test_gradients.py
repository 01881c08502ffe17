"""Gradient norms before and after reduction against the truth, on real ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dtobs.diagnose import diagnose, gather
from dtobs.probes.sampling import LEAST_REDUCED_PERIOD
from dtobs.recording.view import load_run
from tests.harness import run_ranks
from tests.multiprocess.gradient_programs import know_gradients, train_a_temperature_outside


@pytest.mark.parametrize(
    ("wrapper", "accumulate", "sync_all"),
    [
        ("ddp", 1, False),
        ("ddp", 3, False),
        ("ddp", 3, True),  # 1.040 was recorded of 1.056 once
        ("fsdp", 1, False),
        ("fsdp", 3, False),
        ("fsdp", 3, True),
        ("hsdp", 1, False),
        ("fsdp1", 1, False),
        ("fsdp1", 3, True),
    ],
)
def test_norms(tmp_path: Path, wrapper: str, accumulate: int, sync_all: bool):
    truth = [r.value for r in run_ranks(know_gradients, 2, tmp_path, wrapper, accumulate, sync_all)]
    window = load_run(tmp_path).steps()
    assert window.valid.all()
    np.testing.assert_array_equal(window.field("sample_norm"), window.field("local_norm"))
    # That DDP reduces after each micro-batch is known after the first step; what is not known is not said.
    unknown = int(wrapper == "ddp" and sync_all)
    assert np.isnan(window.field("local_norm")[:, :unknown]).all()
    true = np.array([t.local for t in truth])[:, unknown:]
    np.testing.assert_allclose(window.field("local_norm")[:, unknown:], true, rtol=1e-5)
    shares = window.field("reduced_square").sum(axis=0)
    assert np.isfinite(shares).tolist() == [step % LEAST_REDUCED_PERIOD == 0 for step in window.steps]
    np.testing.assert_allclose(np.sqrt(shares[-1]), truth[0].reduced[-1], rtol=1e-5)
    assert (window.records["nonfinite"] == 0).all()
    assert (window.records["nonfinite_param"] == -1).all()
    if wrapper == "ddp":
        np.testing.assert_allclose(window.field("reduced_norm")[0, -1], truth[0].reduced[-1], rtol=1e-5)
    else:
        assert np.isnan(window.field("reduced_norm")).all()  # no rank holds all of it


@pytest.mark.parametrize("averaged", [False, True])
def test_a_temperature_outside_of_ddp(tmp_path: Path, averaged: bool):
    run_ranks(train_a_temperature_outside, 2, tmp_path, averaged)
    found = diagnose(gather(tmp_path)).findings
    assert [(f.code, f.ranks, f.severity) for f in found] == (
        [] if averaged else [("gradients-not-synchronized", (0, 1), "note")]
    )
    assert averaged or found[0].summary.startswith("the copies of parameter 2 on ranks 0 and 1 began alike")
