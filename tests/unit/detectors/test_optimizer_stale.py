"""Parameters that rest although they are trained; and those that rest for a reason."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dtobs.detectors.silent.optimizer_stale import STEPS, optimizer_stale
from dtobs.events import Kind, Phase
from dtobs.findings import Confidence, Finding
from dtobs.recording.meta import Parameter
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


SHARDS = tuple(Parameter(n, (8, 8), "float32", "mesh:1:abc/0.S(0).0") for n in ("a", "b", "c"))


def sharded(root: Path, *, rests: tuple[int, ...] = (1,), odd: int = 12, slow: int = 0, **fields: float) -> FakeRun:
    """Three ranks with a shard each, of which those that rest leave out the step of the optimizer in step `odd`.

    The first `slow` tensors move in every third step only.
    """
    run = FakeRun(root, 3, layout=None)
    for number, rank in enumerate(run.ranks):
        rank.meta("layout", kind="fsdp", coordinates={}, data_ranks=[0, 1, 2], stage=0)
        rank.parameters(*SHARDS)
        values = [0] * 3
        rank.digests(*values, step=-1)
        for step in range(24):
            moves = step != odd or number not in rests
            values = [v + (moves and (n >= slow or step % 3 == 0)) for n, v in enumerate(values)]
            rank.step(params_digest=sum(values) + 1, **({"learning_rate": 1e-3, "micro_batches": 1} | fields))
            rank.digests(*values)
    return run


def test_a_step_that_one_shard_leaves_out_is_found(tmp_path: Path):
    (one,) = optimizer_stale(sharded(tmp_path).view())
    assert (one.code, one.ranks, one.step, one.confidence) == ("optimizer-stale", (1,), 12, Confidence.LIKELY)
    assert one.summary.startswith("rank 1 left out an optimizer step in step 12, which ranks 0 and 2 took")


def test_a_step_that_leaves_shards_alone_for_a_reason(tmp_path: Path):
    runs = {
        "all left it out": {"rests": (0, 1, 2)},
        "no tensor moves in every step": {"slow": 3, "odd": 13},
        "few tensors move in every step, as where updates are nearly lost": {"slow": 2, "odd": 13},
        "the learning rate is zero": {"learning_rate": 0.0},
        "no backward": {"micro_batches": 0},
        "too early to know what is usual": {"odd": 3},
    }
    for name, options in runs.items():
        assert optimizer_stale(sharded(tmp_path / name, **options).view()) == [], name


@pytest.mark.parametrize("calls", [16, 32])
def test_a_step_with_the_micro_batches_and_the_calls_of_two_is_one_left_out(tmp_path: Path, calls: int):
    run = FakeRun(tmp_path, 2, layout=None)
    for number, rank in enumerate(run.ranks):
        rank.meta("layout", kind="fsdp", coordinates={}, data_ranks=[0, 1], stage=0)
        rank.parameters(*SHARDS)
        for step in range(24):
            odd = number == 1 and step == 12
            rank.step(micro_batches=2 if odd else 1, collectives=calls if odd else 16)
    found = optimizer_stale(run.view())
    assert [(one.ranks, one.step) for one in found] == ([((1,), 12)] if calls == 32 else [])


@pytest.mark.parametrize(
    ("odd", "calls", "peers", "told"),
    [
        (12, 32, False, [((1,), 12)]),
        (12, 16, False, []),  # it only went through more micro-batches
        (None, 16, False, []),
        (12, 32, True, []),  # copies of its stage are compared
    ],
)
def test_a_stage_of_a_pipeline_that_leaves_out_a_step(
    tmp_path: Path, odd: int | None, calls: int, peers: bool, told: list[tuple[tuple[int, ...], int]]
):
    run = FakeRun(tmp_path, 2, layout=None)
    for number, rank in enumerate(run.ranks):
        data = [0, 1] if peers else []
        rank.meta("layout", kind="plain", coordinates={}, data_ranks=data, stage=number)
        rank.meta("pipeline", schedule="Schedule1F1B", micro_batches=4, stages=[number], stage_count=2, ranks=[0, 1])
        rank.parameters(Parameter(f"stage{number}.weight", (8, 8), "float32", ""))
        for step in range(24):
            left_out = number == 1 and step == odd
            rank.step(micro_batches=8 if left_out else 4, collectives=calls if left_out else 16)
    assert [(one.ranks, one.step) for one in optimizer_stale(run.view())] == told
