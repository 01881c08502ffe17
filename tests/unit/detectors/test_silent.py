"""Silent errors: each has runs in which it must be found, and twins in which it must not."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from dtobs.detectors.comparisons import comparisons_off
from dtobs.findings import Confidence
from dtobs.recording.meta import Parameter
from dtobs.testing.fake_run import FakeRun
from tests.unit.detectors.runs import PARAMETERS, findings, hand_on, noisy_run, only

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(3))
def test_healthy_runs_have_no_finding(tmp_path: Path, world: int, seed: int):
    assert findings(noisy_run(tmp_path, world, 80, seed=seed)) == []


def test_an_empty_run_has_no_finding(tmp_path: Path):
    assert findings(FakeRun(tmp_path)) == []
    FakeRun(tmp_path / "b").rank(0)
    assert findings(FakeRun(tmp_path / "b")) == []


# replica-divergence


def diverging(tmp_path: Path, world: int, odd: int, *, again: bool = False) -> FakeRun:
    run = FakeRun(tmp_path, world)
    for number, rank in enumerate(run.ranks):
        rank.parameters(*PARAMETERS).digests(1, 2, 3, step=-1)
        for step in range(10):
            wrong = number == odd and step >= 6 and not (again and step == 9)
            rank.step(params_digest=99 if wrong else step + 1)
            rank.digests(10 + step, 77 if wrong else 20 + step, 78 if wrong else 30 + step)
    return run


def test_the_odd_copy_is_named_with_its_first_step_and_parameter(tmp_path: Path):
    found = only(diverging(tmp_path, 3, odd=1))
    assert (found.code, found.ranks, found.step) == ("replica-divergence", (1,), 6)
    assert found.summary == (
        "rank 1 differs from ranks 0 and 2 in block.weight and 1 more, first seen after step 6;"
        " they were equal after step 5"
    )
    assert found.evidence[0]["parameter"] == "block.weight"


@pytest.mark.parametrize("early", [True, False])
def test_a_copy_that_has_the_others_next_update_already(tmp_path: Path, early: bool):
    run = FakeRun(tmp_path, 3)
    for number, rank in enumerate(run.ranks):
        at = number == 1 and early
        rank.parameters(*PARAMETERS).digests(10 + at, 20 + at, 30 + at, step=-1)
        for step in range(10):
            rank.step(params_digest=step + 1 + at)
            rank.digests(11 + step + at, 21 + step + at, 31 + step + at)
    found = findings(run)
    assert [(f.code, f.ranks) for f in found] == ([("replica-divergence", (1,))] if early else [])
    assert not early or found[0].summary.startswith("rank 1 had before each optimizer step what ranks 0 and 2 had")


def test_a_frozen_copy_that_was_changed_just_now_is_not_ahead(tmp_path: Path):
    run = FakeRun(tmp_path, 2)
    for number, rank in enumerate(run.ranks):
        rank.parameters(*PARAMETERS).digests(7, 20, 30, step=-1)
        for step in range(10):
            changed = number == 1 and step == 9
            rank.step(params_digest=99 if changed else step + 1)
            rank.digests(8 if changed else 7, 21 + step, 31 + step)
    assert only(run).summary.startswith("ranks 0 and 1 differ in embed.weight, first seen after step 9")


def test_of_two_copies_none_is_accused_alone(tmp_path: Path):
    found = only(diverging(tmp_path, 2, odd=1))
    assert (found.ranks, found.confidence) == ((0, 1), Confidence.CERTAIN)
    assert "which of them is wrong cannot be told" in found.summary


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        (lambda number, step: 6 if number and step == 6 else 8, True),
        (lambda number, step: 8, False),
        (lambda number, step: 6 if number else 8, False),  # always
        (lambda number, step: 6 if number and step >= 4 else 8, False),  # long before they parted
        (lambda number, step: 6 if number and step == 7 else 8, False),  # later
    ],
)
def test_copies_that_part_where_ranks_call_unequally_often(
    tmp_path: Path, calls: Callable[[int, int], int], told: bool
):
    run = FakeRun(tmp_path, 2)
    for number, rank in enumerate(run.ranks):
        rank.parameters(*PARAMETERS).digests(1, 2, 3, step=-1)
        for step in range(10):
            wrong = number * (step >= 6)
            rank.step(params_digest=99 + step + 50 * wrong, collectives=calls(number, step))
            rank.digests(10 + step, 20 + step + 50 * wrong, 30 + step)
    found = only(run)
    said = "; step 6 is the first with unequal numbers of collective calls (6 of rank 1, 8 of rank 0)"
    assert found.summary.endswith(said) == told
    assert found.next_step.startswith("Look for a branch that not all ranks take") == told


@pytest.mark.parametrize(("counts", "left_out"), [({9: 2}, True), ({9: 3}, True), ({}, False), ({9: 2, 10: 2}, False)])
def test_the_copy_that_left_out_an_optimizer_step_is_named(tmp_path: Path, counts: dict[int, int], left_out: bool):
    run = FakeRun(tmp_path, 2)
    for number, rank in enumerate(run.ranks):
        rank.parameters(*PARAMETERS).digests(1, 2, 3, step=-1)
        for step in range(12):
            apart = 50 * number * (step >= 9)
            rate = 1e-3 / (1 + step + (number and step >= 9))  # its schedule goes on
            rank.step(
                params_digest=10 + step + apart,
                micro_batches=0
                if not step
                else counts.get(step, 1)
                if number
                else 1,  # the first step was not seen whole
                learning_rate=rate,
            ).digests(10 + step, 20 + step + apart, 30 + step + apart)
    found = findings(run)
    if left_out:
        (one,) = found
        assert (one.code, one.ranks, one.step) == ("replica-divergence", (1,), 9)
        assert one.summary == (
            "rank 1 left out an optimizer step in step 9: since then the copies of the model differ"
            " (block.weight and 1 more, first seen after step 9; they were equal after step 8)"
        )
    else:
        assert {(f.code, f.ranks) for f in found} == {
            ("replica-divergence", (0, 1)),
            ("learning-rate-mismatch", (0, 1)),
        }


def test_copies_that_meet_again_are_periodic_averaging(tmp_path: Path):
    assert findings(diverging(tmp_path, 3, odd=1, again=True)) == []


@pytest.mark.parametrize(
    ("world", "at", "wrong", "named"),
    [
        (3, {12}, (0, 9, 0), (1,)),  # memory of rank 1, in what the owner of the tensor then sends anew
        (2, {12}, (0, 9, 0), (0, 1)),  # of two, either may be the odd one
        (3, {12}, (9, 9, 9), ()),  # all of a copy: other weights swapped in
        (2, {12}, (9, 9, 9), ()),
        (3, {12, 15}, (0, 9, 0), ()),  # again
        (3, {3}, (0, 9, 0), ()),  # a beginning
    ],
)
def test_one_tensor_of_one_copy_in_a_single_look(
    tmp_path: Path, world: int, at: set[int], wrong: tuple[int, ...], named: tuple[int, ...]
):
    run = FakeRun(tmp_path, world)
    for number, rank in enumerate(run.ranks):
        rank.parameters(*PARAMETERS).digests(1, 2, 3, step=-1)
        for step in range(20):
            off = wrong if number == 1 and step in at else (0, 0, 0)
            rank.step(params_digest=step + 1 + 100 * sum(off))
            rank.digests(*(10 * (n + 1) + step + each for n, each in enumerate(off)))
    found = findings(run)
    assert [(f.code, f.ranks, f.step, f.confidence) for f in found] == (
        [("replica-divergence", named, 12, Confidence.LIKELY)] if named else []
    )
    if named:
        since = "first seen after step 12; they were equal after step 11 and again after step 13"
        assert since in found[0].summary


def averaging(tmp_path: Path, apart: list[bool], *, travels: bool = False, policy: int = 0) -> FakeRun:
    """Two copies that differ after the steps that `apart` says; with or without gradients between them."""
    run = FakeRun(tmp_path, 2)
    for number, rank in enumerate(run.ranks):
        rank.parameters(*PARAMETERS).digests(1, 2, 3, step=-1)
        if policy:
            rank.meta("policy", average_every=policy)
        for step, differs in enumerate(apart):
            own = 1000 * (number + 1) if differs else 0
            rank.step(params_digest=own + step + 1, collective_bytes=4e6 if travels else 0.0)
            rank.digests(own + step, own + step + 50, own + step + 90)
    return run


PERIOD_OF_4 = [True, True, True, False] * 3


@pytest.mark.parametrize(
    ("apart", "travels", "policy", "expected"),
    [
        (PERIOD_OF_4 + [True] * 5, True, 0, None),  # apart at the moment, as three times before
        (PERIOD_OF_4 + [True] * 12, True, 0, Confidence.CERTAIN),  # for much longer than ever
        ([True] * 10, False, 0, None),  # the first period, by the look of it
        ([False] * 5 + [True] * 30, False, 0, None),  # a long one: said as a fact, below
        ([True] * 10, True, 0, Confidence.CERTAIN),  # gradients are reduced in every step
        ([True] * 30, True, 50, None),  # declared
        ([False] * 3 + [True] * 30, False, 8, Confidence.CERTAIN),  # declared otherwise
    ],
)
def test_local_sgd_is_told_from_copies_that_part(
    tmp_path: Path, apart: list[bool], travels: bool, policy: int, expected: Confidence | None
):
    found = [f for f in findings(averaging(tmp_path, apart, travels=travels, policy=policy)) if f.code != "seed-policy"]
    assert [f.confidence for f in found] == ([expected] if expected else [])


def test_a_long_first_period_is_a_fact_and_no_finding(tmp_path: Path):
    run = averaging(tmp_path, [False] * 5 + [True] * 30)
    (fact,) = [off for off in comparisons_off(run.view()) if off.reason == "averaged now and then"]
    assert "ranks 0 and 1 differ since step 5" in fact.text
    assert "session.policy(average_every=STEPS)" in fact.text


def test_since_when_copies_are_apart_may_be_longer_ago_than_is_kept(tmp_path: Path):
    run = FakeRun(tmp_path, 2)
    for number, rank in enumerate(run.ranks):
        rank.parameters(*PARAMETERS)
        for step in range(144, 180):
            rank.step(step, params_digest=step + 1000 * number, collective_bytes=0.0).digests(
                step + 1000 * number, 7, 7
            )
    (fact,) = [off for off in comparisons_off(run.view()) if off.reason == "averaged now and then"]
    assert "ranks 0 and 1 differ at least since step 144" in fact.text


def test_of_models_that_step_in_turn_one_is_kept_alike(tmp_path: Path):
    """Actor and critic: the one moves while the other rests, and only the actor is reduced."""
    run = FakeRun(tmp_path, 2)
    for number, rank in enumerate(run.ranks):
        rank.parameters(*(Parameter(name, (4096,), "float32", "copies:2:aa") for name in ("actor", "critic")))
        rank.digests(1, 2, step=-1)
        for step in range(24):
            actor, critic = 10 + step // 2, 100 + step + (1 + step) // 2 * 1000 * (1 + number)
            rank.step(params_digest=actor + critic, collective_bytes=0.0).digests(actor, critic)
    found = only(run)
    assert (found.code, found.confidence) == ("replica-divergence", Confidence.CERTAIN)
    assert "differ in critic" in found.summary


@pytest.mark.parametrize(("travels", "policy"), [(True, 0), (False, 50)])
def test_it_is_not_said_of_copies_that_part_or_where_it_is_declared(tmp_path: Path, travels: bool, policy: int):
    run = averaging(tmp_path, [False] * 5 + [True] * 30, travels=travels, policy=policy)
    assert [off for off in comparisons_off(run.view()) if off.reason == "averaged now and then"] == []


def test_only_equal_keys_are_compared(tmp_path: Path):
    run = FakeRun(tmp_path, 4)
    for number, rank in enumerate(run.ranks):
        shard = Parameter("weight", (8,), "float32", f"mesh:2:aa/0.S(0).{number % 2}")
        rank.parameters(shard, Parameter("own", (8,), "float32", ""))
        rank.step(params_digest=number + 1).digests(number % 2, number)
    assert findings(run) == []


def test_copies_within_a_larger_layout(tmp_path: Path):
    """Tensor parallel: the norm is a copy on both ranks, the matrix is not."""
    run = FakeRun(tmp_path, 2, layout=None)
    for number, rank in enumerate(run.ranks):
        rank.parameters(
            Parameter("matrix", (8,), "float32", f"mesh:1:aa/0.S(0).{number}"),
            Parameter("norm", (8,), "float32", "mesh:2:aa/"),
        )
        rank.step(params_digest=number + 1).digests(number, 5 + number)
    found = only(run)
    assert (found.code, found.ranks, found.evidence[0]["parameter"]) == ("replica-divergence", (0, 1), "norm")


@pytest.mark.parametrize("trained", [True, False])
def test_adapters_beside_a_frozen_model_are_what_travels(tmp_path: Path, trained: bool):
    """DDP reduces the adapter in every step: few bytes beside those of the frozen model. Where all is frozen, none."""
    run = FakeRun(tmp_path, 2)
    for number, rank in enumerate(run.ranks):
        rank.parameters(
            *(Parameter(name, (size,), "float32", "copies:2:aa") for name, size in (("base", 4096), ("adapter", 64)))
        )
        for step in range(30):
            own = (2 + step * trained) * 100 * (1 + number) if step or not trained else 7
            rank.step(params_digest=own, collective_bytes=256.0).digests(5000, own)
    assert [f.code for f in findings(run) if f.code == "replica-divergence"] == ["replica-divergence"] * trained


@pytest.mark.parametrize(("shards", "codes"), [((0, 1), ["replica-divergence"]), ((0, 0), [])])
def test_copies_beside_shards_of_one_model_do_not_go_their_own_ways(
    tmp_path: Path, shards: tuple[int, int], codes: list[str]
):
    """A tensor-parallel bias that drifts: its gradient needs no word of the others, and is no local SGD's."""
    run = FakeRun(tmp_path, 2)
    for number, rank in enumerate(run.ranks):
        rank.parameters(
            Parameter("matrix", (8,), "float32", f"mesh:1:aa/0.S(0).{shards[number]}"),
            Parameter("bias", (8,), "float32", "mesh:2:aa/"),
        )
        for step in range(30):
            drifted = number * (step > 4)
            rank.step(params_digest=1000 * number + step + 1, collective_bytes=1.0).digests(
                1000 * shards[number] + step + 500 * drifted, 5000 + step + 1000 * drifted
            )
    assert [f.code for f in findings(run) if f.code != "seed-policy"] == codes


# data-overlap


def test_ranks_that_read_the_same(tmp_path: Path):
    def same(rank: int, step: int) -> dict[str, float]:
        return {"input_digest": 50 + step, "local_norm": 1 + step % 7} if rank in (1, 3) else {}

    found = only(noisy_run(tmp_path, 4, change=same))
    assert (found.code, found.ranks, found.step) == ("data-overlap", (1, 3), 0)
    assert found.summary == "ranks 1 and 3 read the same data in 40 of 40 steps"


def test_the_first_step_in_which_ranks_read_the_same_is_told_however_long_ago(tmp_path: Path):
    run = FakeRun(tmp_path, 2)
    for step in range(150):
        for rank in run.ranks:
            rank.step(input_digest=1 + step if step >= 20 else 1000 * (1 + rank.number) + step)
    found = only(run)
    assert (found.code, found.step) == ("data-overlap", 20)
    assert found.summary == "ranks 0 and 1 read the same data in 64 of 64 steps, and did so in step 20 already"


def test_what_stages_are_handed_by_others_that_compute_nan_is_no_equal_data(tmp_path: Path):
    def handed(rank: int, step: int) -> dict[str, float]:
        bad = {"local_norm": NAN, "nonfinite": 1, "nonfinite_param": 0} if step >= 9 else {}
        return bad | {"input_digest": step + (50 if rank in (1, 3) and step > 8 else 100 * rank)}

    assert [found.code for found in findings(noisy_run(tmp_path, 4, change=handed))] == ["gradient-nonfinite"]


@pytest.mark.parametrize(("rule", "codes"), [(None, []), ("same", []), ("differ", ["data-overlap"])])
def test_equal_inputs_with_gradients_of_their_own_may_be_the_point(tmp_path: Path, rule: str | None, codes: list[str]):
    run = noisy_run(tmp_path, 2, change=lambda rank, step: {"input_digest": 50 + step})
    for rank in run.ranks:
        if rule:
            rank.meta("policy", data=rule)
    assert [f.code for f in findings(run)] == codes


@pytest.mark.parametrize(
    "change",
    [
        lambda rank, step: {"input_digest": 7},  # a constant batch
        lambda rank, step: {"input_digest": 50} if step == 5 else {},  # once by chance
        lambda rank, step: {"input_digest": 50 + step} if step % 4 == 0 else {},  # few samples, drawn at random
        lambda rank, step: {"input_digest": 0},  # not measured
        lambda rank, step: {"input_digest": 50 + step + rank},  # the same data, a step apart
    ],
)
def test_equal_inputs_that_prove_nothing(tmp_path: Path, change):
    assert findings(noisy_run(tmp_path, 3, change=change)) == []


def test_ranks_that_share_samples_by_design(tmp_path: Path):
    """Tensor parallel pairs read the same; which ranks are peers is not known at all in the second run."""
    run = FakeRun(tmp_path, 4, layout=None)
    for number, rank in enumerate(run.ranks):
        rank.meta("layout", kind="fsdp", data_ranks=[number % 2, number % 2 + 2], stage=0, dropout=0)
        for step in range(20):
            rank.step(input_digest=100 * (number // 2) + step + 1)
    assert findings(run) == []
    same = lambda rank, step: {"input_digest": step + 1}  # noqa: E731
    assert findings(noisy_run(tmp_path / "unknown", 2, change=same, layout=None)) == []


# local-gradient-outlier


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("factor", [50.0, 1 / 50])
def test_one_loud_rank_is_found_within_a_few_steps(tmp_path: Path, world: int, factor: float):
    run = noisy_run(tmp_path, world, 30)
    for step in range(30, 35):
        for number, rank in enumerate(run.ranks):
            rank.step(step, local_norm=1.2 * (factor if number == 1 else 1.0))
    found = only(run)
    assert (found.code, found.ranks, found.step) == ("local-gradient-outlier", (1,), 30)
    assert found.evidence[0]["ratio"] == pytest.approx(factor, rel=0.5)


def two_pipelines(path: Path, loud: dict[int, int]) -> FakeRun:
    """Ranks 0 to 2 and 3 to 5 are the stages of two pipelines; `loud`: ranks whose gradient is, by their first step."""

    def change(rank: int, step: int) -> dict[str, float]:
        return {"local_norm": 60.0} if step >= loud.get(rank, 40) else {"local_norm": 1.2}

    run = noisy_run(path, 6, 40, change)
    for rank in run.ranks:
        stage = rank.number % 3
        rank.meta("layout", kind="plain", data_ranks=[stage, stage + 3], stage=stage, coordinates={}, dropout=0)
    hand_on(run, [[0, 1, 2], [3, 4, 5]], 40)
    return run


def test_a_loud_gradient_that_a_pipeline_handed_back_is_that_of_the_last_stage(tmp_path: Path):
    found = only(two_pipelines(tmp_path, {0: 30, 1: 30, 2: 30}))
    assert (found.code, found.ranks) == ("local-gradient-outlier", (2,))
    assert found.summary.endswith("; ranks 0 and 1 got it back through the pipeline")
    first = two_pipelines(tmp_path / "the first was loud before", {0: 28, 1: 30})
    assert [found.ranks for found in findings(first)] == [(0,), (1,)]
    apart = two_pipelines(tmp_path / "of two pipelines", {0: 30, 4: 30})
    assert [found.ranks for found in findings(apart)] == [(0,), (4,)]


@pytest.mark.parametrize("world", [2, 3])
def test_one_rank_loud_from_the_beginning(tmp_path: Path, world: int):
    loud = lambda rank, step: {"local_norm": 60.0 + step % 3} if rank == 1 else {"local_norm": 1.0}  # noqa: E731
    found = only(noisy_run(tmp_path, world, 20, change=loud))
    assert (found.code, found.ranks, found.confidence) == ("local-gradient-outlier", (1,), Confidence.POSSIBLE)
    own = noisy_run(tmp_path / "own", world, 20, change=loud)
    for rank in own.ranks:
        rank.meta("policy", data="own")
    assert findings(own) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda rank, step: {"local_norm": 3.0 if rank == 0 else 1.0},  # steadily heavier data
        lambda rank, step: {"local_norm": (20.0 if rank == 0 else 1.0) + step % 3},  # a domain of its own
        lambda rank, step: {"local_norm": 50.0 if step >= 20 else 1.0},  # a spike of the whole job
        lambda rank, step: {"local_norm": 4.0} if (rank, step) == (1, 20) else {},  # one hard batch
        lambda rank, step: {"local_norm": 20.0} if (rank, step) in ((0, 13), (0, 15), (1, 14)) else {},
        lambda rank, step: {"local_norm": NAN},  # not measured
        lambda rank, step: {"local_norm": NAN} if step == 20 else {},
        lambda rank, step: {"local_norm": 0.0},
    ],
)
def test_norms_that_accuse_nobody(tmp_path: Path, change):
    assert findings(noisy_run(tmp_path, 3, change=change)) == []


def test_one_wild_step_does_not_blind_the_next(tmp_path: Path):
    def change(rank: int, step: int) -> dict[str, float]:
        return {"local_norm": 1e9} if step == 10 else {"local_norm": 90.0} if rank == 2 and step >= 30 else {}

    found = only(noisy_run(tmp_path, 3, change=change))
    assert found.ranks == (2,)


# gradient-nonfinite, loss-nonfinite


@pytest.mark.parametrize("value", [NAN, INF])
def test_loss(tmp_path: Path, value: float):
    def change(rank: int, step: int) -> dict[str, float]:
        return {"loss": value} if step > 20 or (rank == 1 and step == 20) else {}

    found = only(noisy_run(tmp_path, 2, change=change))
    assert (found.code, found.ranks, found.step) == ("loss-nonfinite", (1,), 20)
    assert found.summary == f"rank 1 has a loss of {value} in step 20"


def test_a_loss_that_nobody_reports_is_no_loss_of_nan(tmp_path: Path):
    run = noisy_run(tmp_path, 2, change=lambda rank, step: {"loss": NAN, "losses": 0} if step % 2 else {})
    assert findings(run) == []
