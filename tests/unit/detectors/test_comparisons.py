"""What is not compared is said, with its reason; what has nothing to compare is not mentioned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dtobs
from dtobs.detectors.comparisons import comparisons_off
from dtobs.diagnose.analyse import diagnose
from dtobs.diagnose.gather import Evidence
from dtobs.exporters.look import MonitorSnapshot
from dtobs.exporters.prometheus import exposition
from dtobs.exporters.totals import StepTotals
from dtobs.recording.meta import Parameter
from dtobs.recording.view import load_run
from dtobs.session.identity import launched_as
from dtobs.testing.fake_run import FakeRun
from dtobs.tui.model import build_frame
from dtobs.tui.plain import render


def run_of(tmp_path: Path, layouts: list[dict[str, Any] | None], replica: str = "copies:2:x") -> FakeRun:
    run = FakeRun(tmp_path / "run", len(layouts), layout=None)
    for rank, layout in zip(run.ranks, layouts, strict=True):
        if layout is not None:
            rank.meta("layout", **layout)
            rank.parameters(Parameter("weight", (2, 2), "float32", replica))
        rank.step()
    return run


def layout(rank: int, data: list[int] | None = None, **fields: Any) -> dict[str, Any]:
    return {"kind": "plain", "data_ranks": data or [], "coordinates": {}, **fields}


def reasons(run: FakeRun) -> list[tuple[str, str]]:
    return [(off.check, off.reason) for off in comparisons_off(run.view())]


@pytest.mark.parametrize(
    ("layouts", "expected"),
    [
        ([layout(0, [0], kind="ddp"), layout(1, [1], kind="ddp")], "groups of one"),
        ([layout(r, [r], coordinates={"data": 0, "tensor": r}) for r in (0, 1)], "one data rank"),
        ([layout(r, coordinates={"x": r}) for r in (0, 1)], "unknown dimension"),
        ([layout(0), layout(1)], "no mesh"),
        ([layout(0, [0, 7]), layout(1, [1, 8])], "peers not recorded"),
    ],
)
def test_why_no_rank_has_peers(tmp_path: Path, layouts: list[dict[str, Any]], expected: str):
    assert ("data peers", expected) in reasons(run_of(tmp_path, layouts))


def test_nothing_is_off_where_all_is_known(tmp_path: Path):
    assert reasons(run_of(tmp_path, [layout(r, [0, 1], kind="ddp") for r in (0, 1)])) == []


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ({"0": ""}, [("updates", "arithmetic not known")]),
        ({"0": "sgd", "1": ""}, [("updates", "arithmetic not known")]),
        ({"0": "adam"}, []),
        ({"0": "adam", "1": "sgd"}, []),
        ({"first": ""}, []),  # not ours
    ],
)
def test_an_optimizer_whose_arithmetic_is_not_known(
    tmp_path: Path, kinds: dict[str, str], expected: list[tuple[str, str]]
):
    run = run_of(tmp_path, [layout(r, [0, 1], kind="ddp") for r in (0, 1)])
    for rank in run.ranks:
        rank.meta("law", name="updates", since=0, kinds=kinds, optimizers=[0], rows=["a"], dtypes=["float32"])
    assert reasons(run) == expected


def test_one_process_has_nobody_to_be_compared_with(tmp_path: Path):
    assert reasons(run_of(tmp_path, [layout(0)], replica="own:1:")) == []


@pytest.mark.parametrize("shapes", [((4, 2), (0,)), ((4, 2), (4, 2))])
def test_of_what_single_ranks_hold_whole_nobody_asks_for_copies(tmp_path: Path, shapes: tuple[tuple[int, ...], ...]):
    run = run_of(tmp_path, [layout(r, [0, 1]) for r in (0, 1)])
    for rank, shape in zip(run.ranks, shapes, strict=True):
        rank.parameters(Parameter("dense", (2,), "float32", "all"), Parameter("table", shape, "float32"))
    assert (("copies of the model", "copies unknown") in reasons(run)) == (shapes[0] == shapes[1])


def test_what_else_is_off(tmp_path: Path):
    run = run_of(tmp_path, [layout(r, [0, 1]) for r in (0, 1)], replica="")
    assert reasons(run) == [("copies of the model", "copies unknown")]
    run.rank(1).meta("probe", name="ledger", state="off", reason="the backward is compiled", short="compiled backward")
    run.rank(0).meta("probe", name="inputs", state="failed", reason="ValueError: no")
    run.rank(0).meta("unobserved", what="LBFGS of 2 parameters", step=9, why="name both to session.watch")
    assert set(reasons(run)) == {
        ("copies of the model", "copies unknown"),
        ("gradients", "compiled backward"),
        ("inputs", "failed"),
        ("optimizer", "not followed"),
    }


@pytest.mark.parametrize(
    ("began", "now", "said"),
    [
        ((1, 1, 1), (5, 6, 7), " (1 of them differs between all of ranks 0-2 after step 8: weight; 1 began alike)"),
        ((1, 1, 2), (5, 6, 7), " (1 of them differs between all of ranks 0-2 after step 8: weight)"),
        ((1, 1, 1), (5, 6, 6), ""),
        ((1, 1, 1), (1, 1, 1), ""),
    ],
)
def test_what_began_alike_and_is_so_no_more_is_told_where_copies_are_unknown(
    tmp_path: Path, began: tuple[int, ...], now: tuple[int, ...], said: str
):
    run = run_of(tmp_path, [layout(r, [0, 1, 2]) for r in range(3)], replica="")
    for rank, first, last in zip(run.ranks, began, now, strict=True):
        rank.digests(first, step=-1).digests(last, step=8)
    (text,) = [off.text for off in comparisons_off(run.view()) if off.reason == "copies unknown"]
    assert f"which ranks hold copies of them{said}; where some do" in text


def test_gradients_that_are_not_followed_are_told_of_all_ranks_together(tmp_path: Path):
    run = run_of(tmp_path, [layout(r, [0, 1]) for r in (0, 1)])
    for rank, name in zip(run.ranks, ("a", "b"), strict=True):
        rank.meta("probe", name="ledger", state="off", reason=f"{name} is reduced to one rank", short="elsewhere")
    said = [off.text for off in comparisons_off(run.view()) if off.reason == "elsewhere"]
    assert said == [
        "what becomes of each rank's gradient is not followed on ranks 0 and 1: on rank 0, a is reduced to one rank"
    ]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("4 layers, statistics of each rank", [("batch norm", "statistics of each rank")]),
        ("4 layers, statistics of all ranks", []),
    ],
)
def test_batch_norm_of_each_rank_is_told_as_a_fact(said: str, expected: list[tuple[str, str]], tmp_path: Path):
    run = run_of(tmp_path, [layout(0, [0, 1]), layout(1, [0, 1])])
    for rank in run.ranks:
        rank.meta("settings", step=0, fields={"batch norm": said})
    assert reasons(run) == expected


def test_no_model_is_said_once_there_are_steps(tmp_path: Path):
    assert reasons(run_of(tmp_path, [None, None])) == [("parameters", "no model")]


def test_it_is_told_wherever_people_look(tmp_path: Path):
    run = run_of(tmp_path, [layout(0), layout(1)])
    view = run.view()
    assert any("no mesh" in off.reason for off in comparisons_off(view))
    assert any("give attach(mesh=…)" in note for note in diagnose(Evidence("x", view)).notes)
    assert "note: inputs, seeds, settings and gradient norms are not compared" in render(build_frame(view))
    text = exposition(MonitorSnapshot(view, totals=StepTotals())).decode()
    assert 'dtobs_comparison_off{check="data peers",reason="no mesh",run="run"} 1.0' in text


def test_a_world_of_one_that_was_started_as_many(tmp_path: Path):
    assert launched_as(1, {"SLURM_STEP_NUM_TASKS": "4"}) == "SLURM_STEP_NUM_TASKS=4"
    assert launched_as(1, {"SLURM_STEP_NUM_TASKS": "1", "WORLD_SIZE": "1"}) == ""
    assert launched_as(4, {"WORLD_SIZE": "4"}) == ""
    run = run_of(tmp_path, [layout(0)], replica="own:1:")
    run.rank(0).meta("process", launched_as="SLURM_STEP_NUM_TASKS=4")
    assert reasons(run) == [("ranks", "a world of one")]


LAYERS = "dropout and batch-norm layers in training mode"


@pytest.mark.parametrize(
    ("before", "after", "train", "evaluate", "said"),
    [
        ("2 of 2", "0 of 2", 8, 16, True),
        ("0 of 2", "0 of 2", 8, 16, False),  # from the beginning: on purpose
        ("2 of 2", "1 of 2", 8, 16, False),  # a part is frozen
        ("2 of 2", "0 of 2", 24, 8, False),  # a validation
        ("2 of 2", "0 of 2", 24, 0, False),  # layers put into evaluation mode one by one
    ],
)
def test_training_that_goes_on_in_evaluation_mode(
    tmp_path: Path, before: str, after: str, train: int, evaluate: int, said: bool
):
    run = FakeRun(tmp_path, 2)
    rank = run.rank(1).meta("settings", step=1, fields={LAYERS: before})
    for number in range(train + evaluate):
        late = number >= train
        run.rank(0).step()
        rank.step(micro_batches=0, validation=0.1, forward=0.0) if late else rank.step(micro_batches=1)
    rank.meta("settings", step=train + 1, fields={LAYERS: after})
    texts = [off.text for off in comparisons_off(run.view()) if off.check == "evaluation mode"]
    assert len(texts) == said
    if said:
        assert texts[0].startswith(
            "the model of rank 1 has been trained in evaluation mode since step 8 or before, and "
        )


def passes(model: nn.Module, number: int) -> None:
    with torch.no_grad():
        for _ in range(number):
            model(torch.ones(2, 4))


def evaluated(model: nn.Module) -> None:
    model.eval()
    passes(model, 6)
    model.train()


@pytest.mark.parametrize(
    ("rate", "early", "each", "validation", "said"),
    [
        (0.1, 0, 0, lambda model: passes(model, 6), True),
        (0.1, 0, 0, evaluated, False),
        (0.0, 0, 0, lambda model: passes(model, 6), False),  # nothing is dropped
        (0.1, 6, 0, evaluated, False),  # before any training, as to fill batch norm's statistics
        (0.1, 0, 2, evaluated, False),  # targets of a consistency loss, in every step
    ],
)
def test_a_validation_in_training_mode(
    tmp_path: Path, rate: float, early: int, each: int, validation: Callable[[nn.Module], None], said: bool
):
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(rate))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with dtobs.attach(model, optimizer, run_dir=tmp_path, monitor=False):
        passes(model, early)
        for _ in range(8):
            passes(model, each)
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
        validation(model)
    texts = [off.text for off in comparisons_off(load_run(tmp_path)) if off.check == "evaluation mode"]
    assert len(texts) == said
    assert not said or texts[0].startswith(
        "passes without gradients on rank 0, first in step 9, ran with 1 dropout or batch-norm layer in training mode"
    )


class Branches(nn.Module):
    """`used` is trained; `other` is called in the steps of `calls`."""

    def __init__(self, calls: set[int]) -> None:
        super().__init__()
        self.used, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.calls, self.step = calls, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return self.used(x) + (self.other(x) if self.step in self.calls else 0.0)


ALWAYS, NEVER = set(range(100)), set[int]()


@pytest.mark.parametrize(
    ("calls", "held", "by_hand", "said"),
    [
        (ALWAYS, True, False, ""),
        (
            NEVER,
            True,
            False,
            "no gradient came to other.weight, other.bias of rank 0 in any step looked at, and nothing changes",
        ),
        ({16, 32}, True, False, ""),  # an expert that is seldom chosen
        (NEVER, False, False, ""),  # frozen, as it were
        (
            ALWAYS,
            False,
            False,
            "gradients are computed for other.weight, other.bias of rank 0, which no optimizer holds and nothing",
        ),
        (ALWAYS, False, True, ""),  # the loop updates them itself
    ],
)
def test_parameters_that_nothing_trains(tmp_path: Path, calls: set[int], held: bool, by_hand: bool, said: str):
    model = Branches(calls)
    optimizer = torch.optim.AdamW(model.parameters() if held else model.used.parameters(), 0.01)
    with dtobs.attach(model, optimizer, run_dir=tmp_path, monitor=False, replicas="auto"):
        for _ in range(40):
            model.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            if by_hand:
                with torch.no_grad():
                    for parameter in model.other.parameters():
                        parameter -= 0.01 * parameter.grad
    texts = [off.text for off in comparisons_off(load_run(tmp_path)) if off.check == "parameters"]
    assert len(texts) == bool(said)
    assert not said or texts[0].startswith(said)


@pytest.mark.parametrize(("parts", "told"), [(False, True), (True, False)])
def test_a_model_of_which_the_loop_calls_a_method_only(tmp_path: Path, parts: bool, told: bool):
    model = Branches(ALWAYS)
    given = [model.used, model.other] if parts else model
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with dtobs.attach(given, optimizer, run_dir=tmp_path, monitor=False):
        for _ in range(20):
            model.zero_grad()
            model.forward(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
    texts = [off.text for off in comparisons_off(load_run(tmp_path)) if off.reason == "model never called"]
    assert len(texts) == told
    assert not told or texts[0].startswith(
        "the model of rank 0 is never called itself, but a method of it or its parts"
    )
