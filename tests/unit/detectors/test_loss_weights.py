"""What tokens count: undivided sums and means of means are named, ordinary losses are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from dtobs.detectors.silent.loss_weights import divided_twice, loss_weights
from dtobs.findings import Confidence, Finding
from dtobs.recording.laws import LOSS_WEIGHTS
from dtobs.testing.fake_run import FakeRank, FakeRun
from tests.unit.detectors.ledgers import Case, ledger_run, mean

Tokens = Callable[[int, int, int], int]
"""(rank, step, micro-batch) → tokens that count."""


def full(rank: int, step: int, micro: int) -> int:
    return 64


def padded(rank: int, step: int, micro: int) -> int:
    return 16 + 12 * ((rank + step + micro) % 5)


def each(weight: float) -> Callable[[Sequence[int]], list[float]]:
    """Every micro-batch weighs the same."""
    return lambda tokens: [weight] * len(tokens)


def by_token(tokens: Sequence[int]) -> list[float]:
    """Every token weighs the same."""
    return [n / sum(tokens) for n in tokens]


def keep(run: FakeRun, micros: int, tokens: Tokens, weights: Callable[..., list[float]], **losses: float) -> FakeRun:
    """Write what each backward of twelve steps was handed; `weights` of a rank's micro-batches."""
    for rank in run.ranks:
        backwards(rank, micros, 12, tokens, weights, **losses)
    return run.steps(12)


def backwards(
    rank: FakeRank,
    micros: int,
    steps: int,
    tokens: Tokens,
    weights: Callable[..., list[float]],
    losses: float = 1,
    apart: float = 1.0,
) -> None:
    """Write what each backward of one rank was handed: `losses`, whose tokens weigh up to `apart` times one another."""
    record = np.zeros((), LOSS_WEIGHTS.dtype)
    ring = rank.recorder.law(LOSS_WEIGHTS)
    for step in range(1, steps + 1):
        counts = [tokens(rank.number, step, m) for m in range(micros)]
        for micro, (counted, total) in enumerate(zip(counts, weights(counts), strict=True)):
            record["step"], record["micro"], record["losses"] = step, micro, losses
            record["tokens"], record["total"] = counted, total
            record["least"], record["largest"] = total / max(1, counted), apart * total / max(1, counted)
            ring.append(record)


def found(root: Path, world: int, *args: object, **options: float) -> list[Finding]:
    return loss_weights(keep(FakeRun(root, world), *args, **options).view())  # type: ignore[arg-type]


@pytest.mark.parametrize("world", [1, 2])
def test_micro_batches_that_nobody_divides(tmp_path: Path, world: int):
    run = ledger_run(tmp_path, Case(world, 4, steps=3))
    (one,) = loss_weights(keep(run, 4, full, each(1.0)).view())
    assert (one.code, one.aspect, one.confidence) == ("accumulation-not-normalized", "not divided", Confidence.LIKELY)
    assert "4 backwards a step" in one.summary
    assert "4 times as large" in one.summary


def test_two_losses_of_a_step_may_be_two_losses(tmp_path: Path):
    run = ledger_run(tmp_path, Case(1, 2, steps=3))
    (one,) = loss_weights(keep(run, 2, full, each(1.0)).view())
    assert one.confidence == Confidence.POSSIBLE


def test_who_does_not_see_the_gradients_does_not_say_that_nobody_divides_them(tmp_path: Path):
    assert found(tmp_path, 2, 4, full, each(1.0)) == []


def test_a_gradient_that_is_divided_before_the_optimizer(tmp_path: Path):
    def quarter(case, step, name, rank, shares):
        return mean(case, step, name, rank, shares) / 4

    run = ledger_run(tmp_path, Case(2, 4, final=quarter, steps=3))
    assert loss_weights(keep(run, 4, full, each(1.0)).view()) == []


@pytest.mark.parametrize(("weight", "summed", "told"), [(0.25, False, True), (0.25, True, False), (0.5, False, False)])
def test_losses_divided_by_the_ranks_are_a_fact_where_gradients_are_averaged(
    tmp_path: Path, weight: float, summed: bool, told: bool
):
    def added(case, step, name, rank, shares):
        return case.world * mean(case, step, name, rank, shares)

    run = ledger_run(tmp_path, Case(4, 2, steps=3, **({"final": added} if summed else {})))
    view = keep(run, 2, full, each(weight / 2)).view()
    notes = divided_twice(view)
    assert [note.startswith("the losses of ranks 0-3 weigh 1/4 on each") for note in notes] == [True] * told


@pytest.mark.parametrize(("world", "micros", "where"), [(1, 4, "micro-batches"), (2, 1, "ranks"), (2, 2, "ranks and")])
def test_a_mean_of_means(tmp_path: Path, world: int, micros: int, where: str):
    (one,) = found(tmp_path, world, micros, padded, each(1 / micros))
    assert (one.code, one.aspect, one.confidence) == (
        "accumulation-not-normalized",
        "mean of means",
        Confidence.POSSIBLE,
    )
    assert f"means of {where}" in one.summary


@pytest.mark.parametrize(
    ("factors", "named", "said"),
    [
        ((1.0, 2.0), (1,), "the losses of rank 1 weigh 2 where those of rank 0 weigh 1"),
        ((2.0, 4.0), (0, 1), "the losses of ranks 0 and 1 weigh 2 and 4"),
        ((1024.0, 512.0, 1024.0, 1024.0), (1,), "where those of ranks 0, 2 and 3 weigh 1024"),
    ],
)
def test_a_rank_that_multiplies_its_loss(tmp_path: Path, factors: Sequence[float], named: tuple[int, ...], said: str):
    run = FakeRun(tmp_path, len(factors))
    for rank, factor in zip(run.ranks, factors, strict=True):
        backwards(rank, 2, 12, full, each(factor / 2))
    (one,) = loss_weights(run.steps(12).view())
    assert (one.code, one.ranks, one.confidence, one.step) == ("gradient-scale-mismatch", named, Confidence.LIKELY, 1)
    assert said in one.summary


@pytest.mark.parametrize(("begin", "told"), [(20, True), (33, True), (34, False)])
def test_a_rank_that_begins_to_multiply_its_loss(tmp_path: Path, begin: int, told: bool):
    run = FakeRun(tmp_path, 2)
    for rank in run.ranks:
        weights = iter([0.5 * (3 if rank.number and step >= begin else 1) for step in range(1, 41)])
        backwards(rank, 2, 40, full, lambda tokens, w=weights: [next(w)] * 2)  # type: ignore[misc]
    found = loss_weights(run.steps(40).view())
    assert [(one.code, one.ranks, one.step) for one in found] == [("gradient-scale-mismatch", (1,), begin)] * told


def test_a_rank_whose_domain_weighs_twice_for_some_time(tmp_path: Path):
    run = FakeRun(tmp_path, 2)
    for rank in run.ranks:
        weights = iter([1.0 + (rank.number + step // 10) % 2 for step in range(40)])
        backwards(rank, 2, 40, full, lambda tokens, w=weights: [next(w)] * 2)  # type: ignore[misc]
    assert loss_weights(run.steps(40).view()) == []


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("factors", "named", "said"),
    [
        (
            (1.0, 3.0),
            (1,),
            "each token of rank 1 weighs 3.035 where one of rank 0 weighs 1.012, however many there are in every",
        ),
        ((1.0, 1.0, 0.5, 1.0), (2,), "each token of rank 2 weighs 0.5062 where one of ranks 0, 1 and 3 weighs 1.012"),
    ],
)
def test_a_rank_that_multiplies_the_loss_of_varying_numbers_of_tokens(
    tmp_path: Path, factors: Sequence[float], named: tuple[int, ...], said: str, shared: bool
):
    """Tokens weigh 1 but for labels that are shifted by one; or as many times less as the step has on all ranks."""
    run = FakeRun(tmp_path, len(factors))
    for rank, factor in zip(run.ranks, factors, strict=True):
        weights = iter([1e-3 * (1 + step % 3) if shared else 1.0 for step in range(12)])
        backwards(rank, 2, 12, padded, lambda tokens, f=factor, w=weights: _shifted(tokens, f * next(w)))  # type: ignore[misc]
    (one,) = loss_weights(run.steps(12).view())
    assert (one.code, one.confidence) == ("gradient-scale-mismatch", Confidence.LIKELY)
    if not shared:
        assert one.ranks == named
        assert said in one.summary
    else:
        assert set(one.ranks) == (set(named) if len(factors) > 2 else {0, 1})  # of two, nobody knows which


def _shifted(tokens: Sequence[int], factor: float) -> list[float]:
    return [factor * (n + 0.5) for n in tokens]


@pytest.mark.parametrize(
    "tokens",
    [
        lambda rank, step, micro: 60 + 30 * rank,
        lambda rank, step, micro: (1 + rank) * (40 + 10 * (step % 4)),
        lambda rank, step, micro: 60 + 30 * rank + (step + rank) % 3,
    ],
)
def test_means_of_uneven_batches_are_no_factor_of_a_rank(tmp_path: Path, tokens: Tokens):
    assert "gradient-scale-mismatch" not in [one.code for one in found(tmp_path, 2, 2, tokens, each(0.5))]


@pytest.mark.parametrize(("begin", "told"), [(1, True), (20, True), (34, False)])
def test_a_rank_that_multiplies_the_mean_of_its_varying_numbers_of_tokens(tmp_path: Path, begin: int, told: bool):
    run = FakeRun(tmp_path, 2)
    for rank in run.ranks:
        weights = iter([0.5 * (3 if rank.number and step >= begin else 1) for step in range(1, 41)])
        backwards(rank, 1, 40, padded, lambda tokens, w=weights: [next(w)])  # type: ignore[misc]
    found = [one for one in loss_weights(run.steps(40).view()) if one.code == "gradient-scale-mismatch"]
    assert [one.step for one in found] == [begin] * told
    assert all("losses of rank 1 weigh 3 times those of rank 0" in one.summary for one in found)


def test_ranks_that_weigh_their_samples_by_what_they_are(tmp_path: Path):
    run = FakeRun(tmp_path, 2)
    for rank in run.ranks:
        backwards(rank, 1, 12, lambda rank, step, micro: 64 - (step + rank) % 2, lambda n: [1.0 + n[0] % 2])
    assert [one.code for one in loss_weights(run.steps(12).view())] == []


HEALTHY = {
    "equal micro-batches": (4, full, each(0.25)),
    "one batch": (1, full, each(1.0)),
    "by token": (4, padded, by_token),
    "scaled": (4, full, each(65536 / 4)),
    "slightly uneven": (4, lambda rank, step, micro: 64 - micro, each(0.25)),
    "nothing counted": (2, lambda rank, step, micro: 0, lambda tokens: [0.0] * len(tokens)),
}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_ordinary_losses_have_no_finding(tmp_path: Path, name: str, world: int):
    assert found(tmp_path, world, *HEALTHY[name]) == []


def test_several_losses_in_one_backward_are_left_alone_unless_they_are_chunks_of_one(tmp_path: Path):
    assert found(tmp_path / "apart", 2, 4, padded, each(1.0), losses=2, apart=1.5) == []
    (one,) = found(tmp_path / "chunks", 2, 4, padded, each(0.25), losses=2)
    assert one.aspect == "mean of means"


def test_it_can_be_declared(tmp_path: Path):
    run = keep(FakeRun(tmp_path, 2), 1, padded, each(1.0))
    run.rank(0).meta("policy", token_weights=True)
    assert loss_weights(run.view()) == []


def of_a_rank(root: Path, size: Callable[[int, int], int], weight: Callable[[int, int, int], float]) -> list[Finding]:
    """Four ranks, two backwards a step, none of a cross-entropy; `weight` of (rank, step, elements)."""
    run = FakeRun(root, 4)
    record = np.zeros((), LOSS_WEIGHTS.dtype)
    for rank in run.ranks:
        ring = rank.recorder.law(LOSS_WEIGHTS)
        for step in range(1, 25):
            record["tokens"] = size(rank.number, step)
            record["total"] = weight(rank.number, step, size(rank.number, step))
            for micro in range(2):
                record["step"], record["micro"] = step, micro
                ring.append(record)
    return loss_weights(run.steps(24).view())


SAME, UNEVEN = (lambda rank, step: 640), (lambda rank, step: 320 + 64 * ((3 * rank + step) % 5))


@pytest.mark.parametrize("size", [SAME, UNEVEN], ids=["batches of one size", "batches of several"])
def test_a_rank_that_multiplies_a_loss_of_another_kind(tmp_path: Path, size: Callable[[int, int], int]):
    (one,) = of_a_rank(tmp_path, size, lambda rank, step, n: (3.0 if rank == 2 else 1.0) * step)
    assert (one.code, one.ranks, one.expect) == ("gradient-scale-mismatch", (2,), "loss-weights")
    assert one.summary.startswith(
        "the losses of rank 2 weigh 3 times those of ranks 0, 1 and 3 in every step since step 1"
    )


def test_a_rank_that_begins_to_multiply_it(tmp_path: Path):
    (one,) = of_a_rank(tmp_path, SAME, lambda rank, step, n: 3.0 if rank == 2 and step > 9 else 1.0)
    assert (one.ranks, one.step) == ((2,), 10)
    assert "the losses of rank 2 weigh 3 times those of ranks 0, 1 and 3" in one.summary


OWN = {
    "means of batches of several sizes": (UNEVEN, lambda rank, step, n: 1.0),
    "means of batches that are smaller on one rank": (
        lambda rank, step: 320 if rank else 640,
        lambda rank, step, n: 1.0,
    ),
    "sums over all ranks": (lambda rank, step: 320 if rank else 640, lambda rank, step, n: n / 1600),
    "sums of batches of several sizes": (UNEVEN, lambda rank, step, n: n / 1600),
    "a weight that follows from the data": (SAME, lambda rank, step, n: 2.0 + rank + 0.05 * ((rank + step) % 3)),
    "the same schedule on all": (SAME, lambda rank, step, n: 1.0 / step),
}


@pytest.mark.parametrize("name", OWN)
def test_weights_of_other_losses_that_are_no_mistake(tmp_path: Path, name: str):
    assert of_a_rank(tmp_path, *OWN[name]) == []
