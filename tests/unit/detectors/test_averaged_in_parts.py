"""Ranks of one model, or of one expert, whose gradients are averaged over a part of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dtobs.events import Kind, Phase
from dtobs.findings import Finding
from dtobs.recording.meta import Parameter
from dtobs.testing.fake_run import FakeRun
from tests.unit.detectors.runs import findings

PARTS = {0: 0, 1: 1, 2: 0, 3: 1}
"""Which copy of the model each of the four ranks trains."""
Value = Callable[[int, int], int]


def told(run: FakeRun) -> list[Finding]:
    return [f for f in findings(run) if f.code == "gradients-not-synchronized"]


def apart(rank: int, step: int) -> int:
    return 10 if step < 0 else 1000 + 10 * step + PARTS[rank]


def exchanging(
    root: Path,
    value: Value = apart,
    *,
    phases: tuple[Phase, ...] = (Phase.FORWARD, Phase.BACKWARD),
    inputs: Callable[[int], int] = lambda rank: rank,
    kind: Kind = Kind.COLLECTIVE,
    splits: bool = False,
    copies: Callable[[int], str] = lambda rank: f"copies:2:{PARTS[rank]}",
) -> FakeRun:
    """Four ranks: gradients are averaged over 0 and 2, and over 1 and 3; 0 and 1, and 2 and 3, pass activations."""
    run = FakeRun(root, 4, layout=None)
    groups = [run.group(f"sequence {n}", (2 * n, 2 * n + 1)) for n in range(2)]
    for number, rank in enumerate(run.ranks):
        rank.parameters(*(Parameter(name, (8,), "float32", copies(number)) for name in ("a", "b")))
        rank.digests(7, value(number, -1), step=-1)
        rank.collective("all_gather", groups[number // 2])  # says which group it is
        if splits:
            rank.meta("process", sequence_ranks=[2 * (number // 2), 2 * (number // 2) + 1])
        for step in range(24):
            for phase in phases:
                rank.event(kind, phase=phase, group=groups[number // 2], value=4096.0)
            rank.step(input_digest=1 + 100 * step + inputs(number), params_digest=1 + value(number, step))
            rank.digests(7, value(number, step))
    return run


@pytest.mark.parametrize("singly", [False, True])
def test_ranks_that_exchange_activations_and_do_not_average_over_all(
    tmp_path: Path, singly: bool, monkeypatch: pytest.MonkeyPatch
):
    if singly:
        monkeypatch.setattr(f"{__name__}.PARTS", {rank: rank for rank in range(4)})
    (found,) = told(exchanging(tmp_path))
    where = "not averaged" if singly else "averaged on ranks 0 and 2 and on ranks 1 and 3 only"
    assert (found.ranks, found.severity, found.step) == ((0, 1, 2, 3), "note", 0)
    assert found.summary.startswith("ranks 0-3 began alike and pass each other activations")
    assert f"gradients of the model are {where}: 1 tensor differ" in found.summary


def test_ranks_that_are_given_whole_sequences_and_split_them(tmp_path: Path):
    (found,) = told(exchanging(tmp_path, inputs=lambda rank: rank // 2, splits=True))
    assert found.summary.startswith("ranks 0-3 began alike and pass each other activations")


QUIET = {
    "alike to the end": {"value": lambda rank, step: 1000 + step},
    "each began with values of its own, as an ensemble does": {
        "value": lambda rank, step: 10 + PARTS[rank] if step < 0 else apart(rank, step)
    },
    "averaged now and then": {"value": lambda rank, step: 5000 if step == 8 else apart(rank, step)},
    "one part moved by itself only for a while": {
        "value": lambda rank, step: apart(rank, step) if step > 12 else 1000 + 10 * step
    },
    "metrics only": {"phases": (Phase.OPTIMIZER,)},
    "features without a gradient": {"phases": (Phase.FORWARD,)},
    "messages, as between stages": {"kind": Kind.P2P},
    "copies under one DDP, which averages them": {"copies": lambda rank: "copies:4:0"},
    "the same inputs, as tensor-parallel ranks have": {"inputs": lambda rank: rank // 2},
}


@pytest.mark.parametrize("name", QUIET)
def test_ranks_that_part_for_a_reason(tmp_path: Path, name: str):
    assert told(exchanging(tmp_path, **QUIET[name])) == []


@pytest.mark.parametrize(
    ("dealt", "loss", "over", "said"),
    [
        (4, False, True, "a sampler deals their samples to 4 ranks"),
        (1, True, False, "they call each other"),
        (4, False, False, ""),  # rounds of local training may be longer
        (2, False, True, ""),  # two jobs of two ranks
    ],
)
def test_pairs_that_average_apart_from_each_other(tmp_path: Path, dealt: int, loss: bool, over: bool, said: str):
    run = FakeRun(tmp_path, 4, layout=None)
    groups = [run.group(f"pair {n}", (n, n + 2)) for n in range(2)]
    for number, rank in enumerate(run.ranks):
        rank.parameters(Parameter("a", (8192,), "float32", f"copies:2:{PARTS[number]}")).digests(7, step=-1)
        rank.meta("pass", step=0, sampler=0, shuffles=True, seed=0, epoch=0, replicas=dealt, samples=80)
        for step in range(24):
            rank.event(Kind.STEP_BEGIN)
            rank.collective("all_reduce", groups[PARTS[number]])
            if loss:
                rank.collective("all_reduce")
            rank.step(input_digest=1 + 100 * step + number, params_digest=1 + apart(number, step))
            rank.digests(apart(number, step))
        if over:
            rank.close()
    where = "averaged on ranks 0 and 2 and on ranks 1 and 3 only: 1 tensor differ since step 0"
    whole = f"ranks 0-3 began alike and {said}, but the gradients of the model are {where}"
    assert [f.summary for f in told(run)] == [whole] * bool(said)


def experts(root: Path, began: Callable[[int, int], int], own: tuple[int, ...]) -> FakeRun:
    """Four ranks with a dense tensor and an expert, which began with `began` (rank, row); rows of `own` part."""
    run = FakeRun(root, 4, layout=None)
    for number, rank in enumerate(run.ranks):
        rank.parameters(*(Parameter(name, (64,), "float32", "") for name in ("dense", "more", "expert")))
        rank.digests(*(began(number, row) for row in range(3)), step=-1)
        for step in range(24):
            rank.collective("all_to_all")
            made = [100 * step + 10**6 * row + (number if row in own else began(number, row)) for row in range(3)]
            rank.step(params_digest=1 + step + number, collectives=2).digests(*made)
    return run


def of_two(rank: int, row: int) -> int:
    """Two experts, each on two ranks."""
    return 5 + row + (50 * (rank % 2) if row == 2 else 0)


def test_shards_that_began_alike_are_no_copies(tmp_path: Path):
    run = exchanging(tmp_path)
    for number, rank in enumerate(run.ranks):
        rank.parameters(*(Parameter(name, (8,), "float32", f"mesh:1:d36/0.S(0).{number}") for name in ("a", "b")))
    assert told(run) == []


def test_experts_whose_gradients_nobody_averages(tmp_path: Path):
    (found,) = told(experts(tmp_path, of_two, (2,)))
    assert (found.ranks, found.severity) == ((0, 1, 2, 3), "note")
    assert found.summary.startswith(
        "the copies of expert began alike and have gone apart since step 0 on ranks 0 and 2"
    )


def test_a_dense_tensor_whose_gradient_nobody_averages_beside_experts(tmp_path: Path):
    (found,) = told(experts(tmp_path, of_two, (1,)))
    assert (found.ranks, found.severity) == ((0, 1, 2, 3), "note")
    assert found.summary.startswith("the copies of more on ranks 0-3 began alike and have gone apart since step 0")


def test_experts_that_are_averaged_or_began_alike_everywhere(tmp_path: Path):
    assert told(experts(tmp_path / "averaged", of_two, ())) == []
    assert told(experts(tmp_path / "upcycled", lambda rank, row: 5 + row, (2,))) == []


def cut(
    root: Path,
    *,
    part: tuple[str, ...] = ("embedding", "norm"),
    began: Callable[[int, str], int] = lambda rank, name: 7 + (rank if name == "up" else 0),
    inputs: Callable[[int], int] = lambda rank: 0,
    phases: tuple[Phase, ...] = (Phase.FORWARD,),
    known: bool = True,
) -> FakeRun:
    """Two ranks that read the same and exchange activations: `up` is cut over them, and tensors of `part` part.

    Where what they read is not `known`, the loop calls the layers and not the model.
    """
    run = FakeRun(root, 2, layout=None)
    names = {"embedding": (64, 8), "norm": (8,), "up": (8, 8)}
    for number, rank in enumerate(run.ranks):
        rank.parameters(*(Parameter(name, shape, "float32", "") for name, shape in names.items()))
        rank.digests(*(began(number, name) for name in names), step=-1)
        rank.collective("all_reduce")
        for step in range(24):
            for phase in phases:
                rank.event(Kind.COLLECTIVE, phase=phase, group=run.group(), value=4096.0)
            called = {} if Phase.NONE not in phases else {"forward": 0.0}
            rank.step(input_digest=1 + 100 * step + inputs(number) if known else 0, **called)
            own = {name: number if name == "up" or (name in part and step) else 0 for name in names}
            rank.digests(*(1000 * step + 10**6 * row + own[name] for row, name in enumerate(names)))
    return run


def test_tensors_that_tensor_parallel_ranks_have_whole_and_that_part(tmp_path: Path):
    (found,) = told(cut(tmp_path))
    assert (found.ranks, found.severity, found.expect) == ((0, 1), "note", "own-models")
    assert "embedding and 1 other tensor began alike there and have gone apart" in found.summary


def test_one_tensor_that_parts_while_the_rest_stays_alike(tmp_path: Path):
    """A projection left out of averaging by hand, beside experts; the norm is averaged."""
    apart = {"inputs": lambda rank: rank, "phases": (Phase.FORWARD, Phase.BACKWARD), "part": ("embedding",)}
    (found,) = told(cut(tmp_path, **apart))
    assert "; embedding began alike there and has gone apart, while norm and all else that began" in found.summary


def test_tensor_parallel_ranks_beside_copies_of_each(tmp_path: Path):
    """Two by two: each rank has a copy in the other pair, and what is whole on a pair goes apart in both alike."""
    run = FakeRun(tmp_path, 4, layout=None)
    pairs = [run.group(f"tensor {n}", (2 * n, 2 * n + 1)) for n in range(2)]
    for number, rank in enumerate(run.ranks):
        place, pair = number % 2, number // 2
        names = {"embedding": (64, 8), "up": (8, 8), "norm": (8,)}
        rank.parameters(*(Parameter(n, shape, "float32", f"copies:2:{place}") for n, shape in names.items()))
        rank.digests(7, 8 + place, 9, step=-1)
        for step in range(24):
            rank.collective(group=pairs[pair])
            rank.event(Kind.COLLECTIVE, phase=Phase.FORWARD, group=pairs[pair], value=4096.0)
            rank.step(input_digest=1 + 100 * step + pair)
            rank.digests(*(1000 * step + 10**6 * row + place * (row < 2) for row in range(3)))
    (found,) = told(run)
    assert found.ranks == (0, 1, 2, 3)
    assert found.summary.startswith("ranks 0 and 1, and ranks 2 and 3 read the same samples")
    assert "embedding began alike there and has gone apart, while norm and all else" in found.summary


def test_tensors_that_expert_parallel_ranks_have_whole_and_that_part(tmp_path: Path):
    spread = {"inputs": lambda rank: rank, "phases": (Phase.FORWARD, Phase.BACKWARD)}
    (found,) = told(cut(tmp_path / "apart", **spread))
    assert (found.ranks, found.severity) == ((0, 1), "note")
    assert "as expert-parallel ranks do; embedding and 1 other tensor began alike there" in found.summary
    assert told(cut(tmp_path / "averaged", part=(), **spread)) == []


@pytest.mark.parametrize(
    ("phases", "found"),
    [
        ((Phase.FORWARD, Phase.BACKWARD), True),
        ((Phase.NONE, Phase.BACKWARD), True),  # the layers are called one by one
        ((Phase.FORWARD,), False),
        ((Phase.BACKWARD,), False),
    ],
)
def test_ranks_of_which_nobody_knows_what_they_read(tmp_path: Path, phases: tuple[Phase, ...], found: bool):
    said = told(cut(tmp_path, phases=phases, known=False))
    assert [f.ranks for f in said] == [(0, 1)] * found
    assert all("exchange activations and gradients of them in each step" in f.summary for f in said)
    if found:
        assert told(cut(tmp_path / "alike", phases=phases, known=False, part=())) == []


WHOLE = {
    "they stay alike": {"part": ()},
    "one of them stays alike, and more may": {"part": ("norm",)},
    "nothing is exchanged in the forward": {"phases": (Phase.OPTIMIZER,)},
    "samples of their own, and nothing is exchanged in the backward": {"inputs": lambda rank: rank},
    "models of their own, that teach each other": {"began": lambda rank, name: 7 + rank},
    "only constants began alike": {"began": lambda rank, name: 7 + (rank if name != "norm" else 0)},
    "all began alike": {"began": lambda rank, name: 7},
}


@pytest.mark.parametrize("name", WHOLE)
def test_ranks_that_read_the_same_and_are_left_alone(tmp_path: Path, name: str):
    assert told(cut(tmp_path, **WHOLE[name])) == []


@pytest.mark.parametrize(("left_out", "to_itself"), [(True, False), (True, True), (False, False)])
def test_a_tensor_of_a_stage_whose_gradient_nobody_averages(tmp_path: Path, left_out: bool, to_itself: bool):
    """Two stages of two ranks: the other tensor of each is averaged within the stage, and messages go to the other."""
    run = FakeRun(tmp_path, 4, layout=None)
    stages = [run.group(f"stage {n}", (2 * n, 2 * n + 1)) for n in range(2)]
    for number, rank in enumerate(run.ranks):
        mine, odd = number // 2, left_out and number == 3
        rank.parameters(
            Parameter("weight", (64, 8), "float32", f"copies:2:{mine}"),
            Parameter("bias", (8,), "float32", "" if left_out and mine else f"copies:2:{mine}"),
        )
        rank.digests(10 + mine, 20 + mine, step=-1)
        for step in range(24):
            rank.event(Kind.P2P, group=run.group(), value=float(number ^ (1 if to_itself else 2)))
            rank.collective(group=stages[mine])
            rank.step(collectives=1)
            rank.digests(100 + 10 * step + mine, 1000 + 10 * step + mine + 5 * odd)
    found = told(run)
    assert [(f.ranks, f.severity) for f in found] == [((2, 3), "note")] * (left_out and not to_itself)
    assert all("the copies of bias on ranks 2 and 3 began alike and have gone apart" in f.summary for f in found)
