"""Parameters that rest although they are trained; and those that rest for a reason."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dtobs.detectors.silent.optimizer_stale import STEPS, optimizer_stale
from dtobs.events import Kind, Phase
from dtobs.findings import Confidence, Finding
from dtobs.testing.fake_run import FakeRun
from tests.unit.detectors.runs import PARAMETERS


def found(root: Path, steps: int = 12, moving: int = 0, ranks: int = 2, **fields: float) -> list[Finding]:
    """Runs whose ranks below `ranks` rest but for their first `moving` parameters."""
    run = FakeRun(root, 2)
    for number, rank in enumerate(run.ranks):
        rank.parameters(*PARAMETERS)
        for step in range(steps):
            rank.step(None, **({"local_norm": 1.0, "learning_rate": 1e-3} | fields))
            rank.digests(*(step * (n < moving or number >= ranks) + n for n in range(3)))
    return optimizer_stale(run.view())


def test_resting_parameters_are_found(tmp_path: Path):
    (one,) = found(tmp_path)
    assert (one.code, one.ranks, one.confidence) == ("optimizer-stale", (0, 1), Confidence.CERTAIN)
    assert one.summary.startswith("no parameter of ranks 0 and 1 has changed since step ")


def test_one_resting_rank_is_named(tmp_path: Path):
    (one,) = found(tmp_path, ranks=1)
    assert (one.ranks, one.confidence) == ((0,), Confidence.LIKELY)


QUIET = {
    "one parameter moves": {"moving": 1},
    "too early to tell": {"steps": STEPS - 1},
    "no learning rate yet": {"learning_rate": 0.0},
    "a learning rate nobody knows": {"learning_rate": math.nan},
    "no gradient": {"local_norm": 0.0},
    "steps skipped for overflow": {"local_norm": math.inf, "nonfinite": 2},
    "gradients not read": {"local_norm": math.nan},
}


@pytest.mark.parametrize("name", QUIET)
def test_parameters_that_rest_for_a_reason(tmp_path: Path, name: str):
    assert found(tmp_path, **QUIET[name]) == []


def stepping(root: Path, *, backwards: int = 12, sent: int = 0, mesh: bool = False) -> list[Finding]:
    """Two ranks that work alike, but that the optimizer of rank 1 never steps."""
    layout = {"coordinates": {"tensor": 0}, "data_ranks": [], "stage": 0} if mesh else {"data_ranks": [0, 1]}
    run = FakeRun(root, 2, layout=None)
    for rank in run.ranks:
        rank.meta("layout", **{"kind": "ddp", "coordinates": {}, "stage": 0} | layout)
        rank.page(collectives=14)
    for _ in range(12):
        run.rank(0).step()
    for number in range(backwards):
        run.rank(1).event(Kind.PHASE_BEGIN, phase=Phase.BACKWARD, step=1)
        run.rank(1).collective("broadcast" if number < sent else "all_reduce")
    return optimizer_stale(run.view())


@pytest.mark.parametrize("mesh", [False, True])
def test_an_optimizer_that_never_steps(tmp_path: Path, mesh: bool):
    (one,) = stepping(tmp_path, mesh=mesh)
    assert (one.code, one.ranks, one.confidence) == ("optimizer-stale", (1,), Confidence.LIKELY)
    assert one.summary == "the optimizer of rank 1 never steps, while that of rank 0 has done 12 steps"


def test_a_rank_that_is_behind_or_is_sent_the_model(tmp_path: Path):
    assert stepping(tmp_path / "behind", backwards=3) == []
    assert stepping(tmp_path / "sent", sent=12) == []
