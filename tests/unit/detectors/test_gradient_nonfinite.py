"""gradient-nonfinite: the rank, stage and parameter where a NaN arose, and nobody where that cannot be told."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dtobs.detectors.comparisons import comparisons_off
from dtobs.detectors.silent.gradient_nonfinite import gradient_nonfinite
from dtobs.events import Kind
from dtobs.testing.fake_run import FakeRun
from tests.unit.detectors.runs import PARAMETERS, findings, hand_on, noisy_run, only

NAN, INF = math.nan, math.inf


def test_the_rank_that_computed_the_nan_is_named(tmp_path: Path):
    def change(rank: int, step: int) -> dict[str, float]:
        bad = {"local_norm": NAN, "nonfinite": 2, "nonfinite_param": 1}
        return bad if (rank == 1 and step == 30) or step > 30 else {}

    found = only(noisy_run(tmp_path, 3, change=change))
    assert (found.code, found.ranks, found.step) == ("gradient-nonfinite", (1,), 30)
    assert found.summary == (
        "rank 1 computes NaN or infinity in step 30: first in the gradient of block.weight and 1 more parameters"
    )
    assert found.evidence[-1] == {
        "what": "first parameter",
        "rank": 1,
        "parameter": "block.weight",
        "module": "block",
    }


def test_a_nan_in_a_step_that_never_ended(tmp_path: Path):
    run = noisy_run(tmp_path, 2)
    run.rank(1).event(Kind.NONFINITE_GRADIENT, seq=2, value=NAN)
    run.rank(1).event(Kind.NONFINITE_GRADIENT, seq=1, value=NAN)
    found = only(run)
    assert (found.code, found.ranks, found.step) == ("gradient-nonfinite", (1,), 40)
    assert "block.weight" in found.summary


@pytest.mark.parametrize("seen", [True, False])
def test_a_nan_that_was_not_sampled_where_it_arose_is_nobodys(tmp_path: Path, seen: bool):
    bad = {"local_norm": NAN, "nonfinite": 2, "nonfinite_param": 0}
    run = noisy_run(tmp_path, 2, 14, change=lambda rank, step: bad if step == 13 else {})
    for rank in run.ranks:
        if seen:
            rank.meta("nonfinite", seen="reduced", row=2, step=12)
        rank.meta("nonfinite", seen="parameters", row=0, step=13)
        rank.step(loss=NAN)  # is what came of it
    found = only(run)
    assert (found.code, found.ranks, found.step) == ("gradient-nonfinite", (), 12)
    assert ("the gradient of head.weight" if seen else "in or before step 12: embed.weight") in found.summary
    assert found.summary.endswith("; which rank computed it was not sampled")


def pipeline(path: Path, world: int, steps: int, bad: dict[int, set[int]]) -> FakeRun:
    """Ranks that hand activations on and gradients back; `bad`: ranks with a NaN in their gradients, by step."""

    def change(rank: int, step: int) -> dict[str, float]:
        return {"local_norm": NAN, "nonfinite": 1, "nonfinite_param": 0} if rank in bad.get(step, ()) else {}

    run = noisy_run(path, world, steps, change)
    for rank in run.ranks:
        rank.meta("layout", kind="plain", data_ranks=[], stage=0, coordinates={}, dropout=0)
    hand_on(run, [list(range(world))], steps)
    return run


def test_a_nan_that_a_pipeline_handed_back_is_that_of_the_stage_where_it_arose(tmp_path: Path):
    found = only(pipeline(tmp_path, 4, 40, {30: {0, 1, 2}}))
    assert (found.ranks, found.step, found.confidence) == ((2,), 30, "likely")
    assert found.summary.endswith("; ranks 0 and 1 got it back through the pipeline")


def test_a_nan_of_all_stages_is_certain_of_none(tmp_path: Path):
    found = only(pipeline(tmp_path, 4, 40, {30: {0, 1, 2, 3}}))
    assert (found.ranks, found.confidence) == ((0, 1, 2, 3), "possible")
    assert "it came to most of them from another" in found.summary


@pytest.mark.parametrize(
    ("passes", "ranks"),
    [
        ({1: ("a", "b"), 2: ("", "a"), 3: ("", "a")}, (1,)),  # rank 0's output was finite
        ({0: ("", "a"), 1: ("", "a"), 2: ("", "a"), 3: ("", "a")}, (0,)),  # so was its batch
        ({3: ("a", "")}, (3,)),
        ({1: ("a", "b"), 2: ("positions", "a"), 3: ("", "a")}, (1,)),  # what a later stage looks up is finite
        ({0: ("", "a"), 1: ("", "a"), 2: ("positions", "a"), 3: ("", "a")}, (0,)),
        ({2: ("", "")}, (2,)),  # on a device nobody knows between which modules; rank 3 hands on nothing
    ],
)
def test_a_nan_of_a_forward_pass_is_that_of_the_stage_that_took_finite_values(tmp_path: Path, passes, ranks):
    run = pipeline(tmp_path, 4, 40, {30: {0, 1, 2, 3}})
    for rank, (finite, entered) in passes.items():
        run.rank(rank).meta("forward", step=30, finite=finite, entered=entered, place=1)
    found = only(run)
    assert (found.ranks, found.step, found.confidence) == (ranks, 30, "likely")
    assert found.summary.endswith("; the other stages have it from there")


def test_of_a_ranks_stages_the_one_in_which_it_arose_counts(tmp_path: Path):
    run = pipeline(tmp_path, 4, 40, {30: {0, 1, 2, 3}})
    for rank in run.ranks:
        rank.meta("pipeline", schedule="", stages=[rank.number, rank.number + 4], stage_count=8, ranks=[0, 1, 2, 3])
        rank.meta("forward", step=30, finite="", entered="8.norm", place=0)
        if rank.number == 2:
            rank.meta("forward", step=30, finite="3.fc", entered="3.out", place=9)
    found = only(run)
    assert found.ranks == (2,)
    assert (
        "in the forward pass (the input of 3.fc was finite, the input of 3.out after it was not), then in the"
        in found.summary
    )


def test_a_nan_that_arose_within_one_module_is_said_so(tmp_path: Path):
    """A layer with an adapter uses several parameters of its own, one after another."""
    run = noisy_run(tmp_path, 3)
    for rank in run.ranks:
        rank.meta("nonfinite", seen="parameters", row=0, step=21)
    run.rank(1).meta("forward", step=12, finite="proj", entered="proj", place=3)
    assert only(run).summary.endswith("in step 12, in the forward pass (it arose within proj)")


def test_a_nan_of_the_loss_is_not_laid_at_the_last_module(tmp_path: Path):
    run = noisy_run(tmp_path, 3)
    for rank in run.ranks:
        rank.meta("nonfinite", seen="parameters", row=0, step=21)
    run.rank(1).meta("forward", step=12, finite="head", entered="", place=3, behind=True)
    assert only(run).summary.endswith(
        "in step 12, behind the last module (head), such as in the loss: what followed on that was still finite"
    )


@pytest.mark.parametrize("step", [12, 30])
def test_a_forward_pass_tells_whose_nan_it_was_that_no_gradient_showed(tmp_path: Path, step: int):
    run = noisy_run(tmp_path, 3)
    for rank in run.ranks:
        rank.meta("nonfinite", seen="parameters", row=0, step=21)
    run.rank(1).meta("forward", step=step, finite="block", entered="", place=3)
    found = only(run)
    if step == 12:
        assert (found.ranks, found.step) == ((1,), 12)
        assert found.summary.endswith("in step 12, in the forward pass (the input of block was still finite)")
    else:
        assert (found.ranks, found.step) == ((), 20)


def test_a_nan_in_the_parameters_of_one_stage_is_said_of_it(tmp_path: Path):
    run = pipeline(tmp_path, 4, 40, {31: {0, 1, 2, 3}})
    run.rank(2).meta("nonfinite", seen="parameters", row=1, step=31)
    found = only(run)
    assert (found.ranks, found.step, found.confidence) == ((2,), 30, "likely")
    assert "block.weight of rank 2 held one when step 31 began; no other rank has it" in found.summary


@pytest.mark.parametrize(("alone", "ranks"), [(True, (1,)), (False, ())])
def test_a_nan_that_no_other_copy_has_arose_after_the_average(tmp_path: Path, alone: bool, ranks: tuple[int, ...]):
    run = noisy_run(tmp_path, 3, 13)
    for rank in run.ranks:
        held = 7777 if rank.number == 1 or not alone else 7776
        rank.step(params_digest=held).digests(held, 33, 43)
        if rank.number == 1:
            rank.meta("nonfinite", seen="parameters", row=0, step=14)
        rank.meta("layout", kind="plain", data_ranks=[], stage=0, coordinates={}, dropout=0)
        rank.step(nonfinite=2, local_norm=NAN, nonfinite_param=0)
    found = [f for f in findings(run) if f.code == "gradient-nonfinite"]
    assert [(f.ranks, f.step) for f in found] == [(ranks, 13)]


@pytest.mark.parametrize("layout", [{"kind": "fsdp", "data_ranks": [0, 1]}, {"kind": "plain", "data_ranks": []}])
def test_a_nan_in_one_shard_may_be_of_any_rank(tmp_path: Path, layout):
    bad = {"local_norm": NAN, "nonfinite": 2, "nonfinite_param": 0}
    run = noisy_run(tmp_path, 2, 14, change=lambda rank, step: bad if step == 13 else {})
    for rank in run.ranks:
        rank.meta("layout", stage=0, coordinates={}, dropout=0, **layout)
    run.rank(1).meta("nonfinite", seen="parameters", row=0, step=13)
    assert only(run).ranks == ()


@pytest.mark.parametrize(
    ("bad", "confidence"), [({2}, "certain"), ({0, 1}, "possible"), ({0, 2}, "certain"), ({0, 1, 2}, "possible")]
)
def test_a_nan_of_ranks_that_split_layers_is_certain_of_none(tmp_path: Path, bad: set[int], confidence: str):
    """Ranks 0 and 1 compute one model, and ranks 2 and 3 a copy of it."""
    values = {"local_norm": NAN, "nonfinite": 1, "nonfinite_param": 0}
    run = noisy_run(tmp_path, 4, change=lambda rank, step: values if rank in bad and step == 30 else {})
    for rank in run.ranks:
        data = [rank.number, (rank.number + 2) % 4]
        rank.meta("layout", kind="dtensor", data_ranks=data, stage=0, coordinates={"tp": rank.number % 2}, dropout=0)
    found = only(run)
    assert (found.ranks, found.confidence) == (tuple(sorted(bad)), confidence)
    assert found.summary.endswith("some have it from another") == (confidence == "possible")


@pytest.mark.parametrize(("places", "ranks"), [((5, 4), (1,)), ((5, 5), (0, 1)), ((5, None), (0, 1))])
def test_of_ranks_that_split_layers_the_one_that_had_it_first_computed_it(tmp_path: Path, places, ranks):
    values = {"local_norm": NAN, "nonfinite": 1, "nonfinite_param": 0}
    run = noisy_run(tmp_path, 2, change=lambda rank, step: values if step == 30 else {})
    for rank, place in zip(run.ranks, places, strict=True):
        rank.meta(
            "layout", kind="dtensor", data_ranks=[rank.number], stage=0, coordinates={"tp": rank.number}, dropout=0
        )
        if place is not None:
            rank.meta("forward", step=30, finite="a", entered="b", place=place)
    found = only(run)
    assert (found.ranks, found.confidence) == (ranks, "likely" if len(ranks) == 1 else "possible")


@pytest.mark.parametrize(
    ("op", "began", "entered", "ranks"),
    [
        ("all_to_all", (1,), "", (1,)),
        ("all_to_all", (1,), "block.norm", (0, 1)),  # of an expert, of whichever rank
        ("all_to_all", (0, 1), "", (0, 1)),
        ("all_to_all", (), "", (0, 1)),
        ("all_reduce", (1,), "", (0, 1)),  # each computed one of its own
    ],
)
def test_experts_get_a_nan_back_with_the_gradients_of_tokens(
    tmp_path: Path, op: str, began: tuple[int, ...], entered: str, ranks: tuple[int, ...]
):
    run = FakeRun(tmp_path, 2)
    for rank in run.ranks:
        rank.parameters(*PARAMETERS)
        rank.collective(op)
        for step in range(31):
            bad = step == 30
            rank.step(nonfinite=bad * (1 + rank.number), nonfinite_param=2 - rank.number if bad else -1)
        if rank.number in began:
            rank.meta("forward", step=30, finite="head", entered=entered, place=3)
    (found,) = gradient_nonfinite(run.view())
    assert found.ranks == ranks
    assert ("; rank 0 got it back with the gradients of tokens" in found.summary) == (len(ranks) == 1)


def test_a_scaler_excuses_its_overflows_before_its_first_step_ends(tmp_path: Path):
    run = noisy_run(tmp_path, 2, 3)
    for rank in run.ranks:
        rank.meta("process", loss_scaler="GradScaler")
        rank.event(Kind.NONFINITE_GRADIENT, seq=1, value=INF)
        rank.meta("nonfinite", seen="reduced", row=1, step=3)
    assert findings(run) == []


def test_overflow_is_how_a_loss_scaler_finds_its_scale(tmp_path: Path):
    def overflow(first: int, last: int):
        def change(rank: int, step: int) -> dict[str, float]:
            bad = {"nonfinite": 1, "nonfinite_param": 0, "local_norm": INF} if first <= step < last else {}
            return {"loss_scale": 1024.0, **bad}

        return change

    assert findings(noisy_run(tmp_path / "a", 2, change=overflow(0, 6))) == []
    assert only(noisy_run(tmp_path / "b", 2, change=overflow(5, 40))).code == "gradient-nonfinite"


@pytest.mark.parametrize(("scaled", "ends", "told"), [(False, 40, True), (True, 40, False), (False, 31, False)])
def test_a_nan_that_the_loop_skipped_is_a_fact(tmp_path: Path, scaled: bool, ends: int, told: bool):
    run = noisy_run(tmp_path, 2, ends)
    run.rank(1).meta("forward", step=30, finite="block", entered="", place=3)
    if scaled:
        run.rank(1).meta("process", loss_scaler="GradScaler")
    assert gradient_nonfinite(run.view()) == []
    said = [off.text for off in comparisons_off(run.view()) if off.reason == "a NaN was skipped"]
    assert len(said) == told
    assert not told or said[0].startswith("rank 1 has gone backward from a NaN or an infinity in step 30, in the")
