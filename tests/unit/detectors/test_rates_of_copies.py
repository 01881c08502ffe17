"""Copies of a model that part in the step in which their ranks trained with different learning rates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dtobs.detectors.silent.replica_divergence import replica_divergence
from dtobs.recording.meta import Parameter
from dtobs.testing.fake_run import FakeRun
from tests.unit.detectors.runs import PARAMETERS

COUNTERS = (
    Parameter("norm.weight", (8,), "float32", "copies:n:1"),
    Parameter("norm.num_batches_tracked", (), "int64", "copies:n:1"),
)
TOLD = "; in step 7 they trained with different learning rates (0.001 on rank 0, 0.0015 on rank 1)"


@pytest.mark.parametrize(
    ("rate", "told"),
    [
        (lambda rank, step: 1.5e-3 if rank and step == 7 else 1e-3, True),
        (lambda rank, step: 1.5e-3 if rank and step >= 7 else 1e-3, True),
        (lambda rank, step: 1e-3 / (1 + step), False),
        (lambda rank, step: 1.5e-3 if rank and step == 3 else 1e-3, False),  # the copies were equal after that
        (lambda rank, step: 1.5e-3 if rank and step == 10 else 1e-3, False),  # they had parted by then
    ],
)
def test_a_rate_of_its_own_is_told_where_the_copies_part(tmp_path: Path, rate: Callable[[int, int], float], told: bool):
    run = FakeRun(tmp_path, 2)
    for number, rank in enumerate(run.ranks):
        rank.parameters(*PARAMETERS).digests(1, 2, 3, step=-1)
        for step in range(12):
            wrong = number * (step >= 7)
            rank.step(params_digest=99 + step + 50 * wrong, learning_rate=rate(number, step))
            if step % 2:
                rank.digests(10 + step, 20 + step + 50 * wrong, 30 + step)
    (found,) = replica_divergence(run.view())
    assert found.step == 7
    assert (TOLD in found.summary) == told
    assert ("learning rate" in found.summary) == told


def test_batch_norms_in_other_modes_are_no_copies_that_lag_behind(tmp_path: Path):
    """Each forward of DDP sends rank 0's counters, which a rank in evaluation mode does not count on."""
    run = FakeRun(tmp_path, 2)
    for number, rank in enumerate(run.ranks):
        rank.parameters(*COUNTERS).digests(1, 100 - number, step=-1)
        for step in range(12):
            rank.step(params_digest=99 + step + 50 * number)
            rank.digests(10 + step, 101 + step - number)
    (found,) = replica_divergence(run.view())
    assert "had before" not in found.summary
    assert found.summary.endswith(": batch norms have counted other numbers of batches in training mode")
