"""Copies of which nobody spoke, and ranks that began alike and train models of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dtobs.recording.meta import Parameter
from dtobs.testing.fake_run import FakeRun
from tests.unit.detectors.runs import findings


def learned(
    root: Path, value: Callable[[int, int, int], int], names: tuple[str, ...] = ("w", "w"), **calls: int
) -> FakeRun:
    """Two ranks of which nobody said anything; `value` of (rank, row, step) is what a digest is of."""
    run = FakeRun(root, 2, layout=None)
    for number, rank in enumerate(run.ranks):
        rank.parameters(Parameter(names[number], (8,), "float32", ""), Parameter("shard", (8,), "float32", ""))
        for step in range(30):
            made = [value(number, row, step) for row in (0, 1)]
            count = calls.get("later", 9) if step >= 15 else 9
            sent = calls.get("bytes", 64)
            rank.step(params_digest=1 + 1000 * step + number, collectives=count, collective_bytes=sent).digests(*made)
    return run


def own(number: int, row: int, step: int) -> int:
    """The first row is a copy until step 15, the second one a shard."""
    return 100 * step + (7 * (1 + number) if row else number * (step >= 15))


@pytest.mark.parametrize("names", [("w", "w"), ("embed.weight", "head.weight")])
def test_copies_that_nobody_spoke_of_are_known_by_being_alike(tmp_path: Path, names: tuple[str, str]):
    (found,) = findings(learned(tmp_path, own, names))
    assert (found.code, found.ranks, found.step) == ("replica-divergence", (0, 1), 15)
    assert found.evidence[0]["parameter"] == " / ".join(dict.fromkeys(names))


@pytest.mark.parametrize(
    ("value", "calls"),
    [
        (lambda number, row, step: 100 * step + row * number, {}),  # alike to the end
        (
            lambda number, row, step: 100 * step + number * (1 - row) * (step > 0),
            {},
        ),  # experts that began alike, beside others
        (lambda number, row, step: 5 * (row + 1) + (step >= 15) * (100 * number + step), {}),  # at rest, then trained
        (own, {"later": 1}),  # on their own from step 15 on, with another way to exchange
        (own, {"later": 0}),
        (own, {"bytes": 0}),  # the same program on the same samples, which exchanges nothing
    ],
)
def test_ranks_that_are_alike_or_go_their_own_ways_are_quiet(
    tmp_path: Path, value: Callable[[int, int, int], int], calls: dict[str, int]
):
    assert findings(learned(tmp_path, value, **calls)) == []


@pytest.mark.parametrize(
    ("other", "calls", "width", "found"),
    [
        (0, 1, 128, True),
        (0, 1, 8, False),  # the call is as large as a gradient: something is exchanged
        (0, 0, 128, False),  # each trains alone, on purpose
        (1, 1, 128, False),  # an ensemble
    ],
)
def test_ranks_that_began_alike_and_train_models_of_their_own(
    tmp_path: Path, other: int, calls: int, width: int, found: bool
):
    run = FakeRun(tmp_path, 2, layout=None)
    for number, rank in enumerate(run.ranks):
        rank.parameters(Parameter("w", (width, width), "float32", ""), Parameter("frozen", (8,), "float32", ""))
        rank.step(0).digests(7 + other * number, 3, step=-1)
        for step in range(1, 30):
            if calls:
                rank.collective()
            rank.step(step, params_digest=1000 * number + step, collectives=calls).digests(100 * step + number, 3)
    told = [f for f in findings(run) if f.code == "gradients-not-synchronized"]
    assert [(f.ranks, f.severity, f.step) for f in told] == [((0, 1), "note", 0)] * found


@pytest.mark.parametrize(
    ("dealt", "replica", "inputs", "over", "found"),
    [
        (2, "", "own", True, True),  # who forgot the wrapper
        (2, "", "own", False, False),  # a round of local training may not be over
        (1, "", "own", True, False),  # jobs of one rank each
        (1, "copies:1:{}", "own", True, True),  # DDP over a process group of one rank
        (2, "copies:1:{}", "same", True, False),  # parts of one model
        (1, "reduced alone", "own", True, True),  # gradients averaged by hand over a group of one rank
        (1, "reduced alone", "own", False, False),
    ],
)
def test_ranks_that_never_call_and_whose_samples_are_dealt_to_them(
    tmp_path: Path, dealt: int, replica: str, inputs: str, over: bool, found: bool
):
    run, alone = FakeRun(tmp_path, 2, layout=None), replica == "reduced alone"
    groups = [run.group(f"own {rank}", (rank,)) for rank in range(2)]
    for number, rank in enumerate(run.ranks):
        rank.parameters(Parameter("w", (64, 64), "float32", "" if alone else replica.format(number)))
        rank.meta("pass", step=0, sampler=True, shuffles=True, seed=0, epoch=0, replicas=dealt, samples=99)
        rank.step(0).digests(7, step=-1)
        for step in range(1, 30):
            own = number if inputs == "own" else 0
            if alone:
                rank.collective(group=groups[number])
            rank.step(step, params_digest=1000 * number + step, input_digest=1 + 100 * step + own)
            rank.digests(100 * step + number)
        if over:
            rank.close()
    told = [f for f in findings(run) if f.code == "gradients-not-synchronized"]
    assert [(f.ranks, f.severity, f.step) for f in told] == [((0, 1), "note", 0)] * found
    assert all(("deals their samples to 2 ranks" in f.summary) == (dealt == 2) for f in told)


@pytest.mark.parametrize(
    ("name", "other", "op", "size", "found"),
    [
        ("own", 0, "reduce_scatter", 8, True),
        ("own", 0, "reduce_scatter", 4096, False),  # layers of its own, or experts
        ("own", 0, "all_to_all", 8, False),
        ("own", 1, "reduce_scatter", 8, False),  # began with values of its own
        ("model 2.own", 0, "reduce_scatter", 4096, True),  # a whole model, as one of two that nobody wrapped
        ("model 2.own", 1, "reduce_scatter", 4096, False),
    ],
)
def test_a_tensor_that_is_left_out_of_what_is_done_for_the_rest(
    tmp_path: Path, name: str, other: int, op: str, size: int, found: bool
):
    run = FakeRun(tmp_path, 2)
    for number, rank in enumerate(run.ranks):
        rank.parameters(
            Parameter("w", (64, 64), "float32", f"mesh:1:{number}"), Parameter(name, (size,), "float32", "")
        )
        rank.step(0).digests(7 + number, 3 + other * number, step=-1)
        for step in range(1, 30):
            rank.collective(op)
            rank.step(step, params_digest=1000 * number + step, collectives=1).digests(
                100 * step + number, 10**6 + 100 * step + number
            )
    told = [f for f in findings(run) if f.code == "gradients-not-synchronized"]
    assert [(f.ranks, f.severity) for f in told] == [((0, 1), "note")] * found
    assert all(f.summary.startswith(f"the copies of {name} on ranks 0 and 1 began alike") for f in told)


@pytest.mark.parametrize(("reduced", "found"), [(True, [(3,)]), (False, [])])
def test_a_gradient_travels_although_tokens_are_exchanged_first(
    tmp_path: Path, reduced: bool, found: list[tuple[int, ...]]
):
    """Experts' tokens go between pairs in the backward before gradients are averaged over all four ranks."""
    run = FakeRun(tmp_path, 4, layout={"kind": "plain", "data_ranks": []})
    pairs = [run.group(f"pair {n}", (2 * n, 2 * n + 1)) for n in range(2)]
    for number, rank in enumerate(run.ranks):
        pair = pairs[number // 2]
        rank.parameters(Parameter("dense", (16, 16), "float32", "copies:4:all")).digests(7, step=0)
        for step in range(1, 12):
            rank.collective("all_to_all", pair)
            if reduced:
                rank.collective("all_reduce")
            rank.step(step, params_digest=1000 + step + number, collective_bytes=8192.0, sync_group=pair)
            rank.digests(100 * step + (number == 3))
    told = [f.ranks for f in findings(run) if f.code == "replica-divergence"]
    assert told == found


def test_copies_of_which_some_part_while_others_are_kept_alike(tmp_path: Path):
    """A gradient that is left out of the averaging: no local SGD, although few bytes travel between the ranks."""
    run = FakeRun(tmp_path, 2)
    for number, rank in enumerate(run.ranks):
        rank.parameters(*(Parameter(name, (8,), "float32", "copies:2:aa") for name in ("averaged", "left out")))
        for step in range(30):
            rank.step(params_digest=1000 * number + step + 1, collective_bytes=1.0)
            rank.digests(5000 + step, 9000 + step + 100 * number * (step >= 15))
    (found,) = [f for f in findings(run) if f.code == "replica-divergence"]
    assert (found.step, found.evidence[0]["parameter"]) == (15, "left out")


@pytest.mark.parametrize(("since", "found"), [({0: 5}, 1), ({}, 0), ({0: 13}, 0), ({1: 0}, 0)])
def test_what_only_weight_decay_moved_is_no_copy(tmp_path: Path, since: dict[int, int], found: int):
    run = learned(tmp_path, own)
    for rank in run.ranks:
        rank.meta("process", moved_since=since)
    assert len(findings(run)) == found


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ({0: ("embedding",), 1: ("parameter 0",)}, True),
        ({0: ("embedding", "other"), 1: ("parameter 0", "more")}, False),  # which of them is which?
        ({0: ("embedding",), 1: ()}, False),
    ],
)
def test_a_tied_weight_has_another_name_on_the_last_stage(
    tmp_path: Path, rows: dict[int, tuple[str, ...]], found: bool
):
    """Its gradient was seen to be reduced over both; copies part in the third step."""
    run = FakeRun(tmp_path, 2, layout=None)
    for number, rank in enumerate(run.ranks):
        tied = [Parameter(name, (8, 4), "float32", "copies:2:aa") for name in rows[number]]
        rank.parameters(*tied, Parameter(f"layer {number}", (4, 4), "float32", ""))
        rank.digests(*range(5, 5 + len(tied)), 100 + number, step=-1)
        for step in range(8):
            drift = number if step > 1 else 0
            rank.step().digests(
                *(1000 * step + 10 * row + drift for row in range(len(tied))), 10**6 + 7 * step + number
            )
    told = [f for f in findings(run) if f.code == "replica-divergence"]
    assert [(f.ranks, f.step) for f in told] == [((0, 1), 2)] * found
    assert all("embedding / parameter 0" in f.summary for f in told)
