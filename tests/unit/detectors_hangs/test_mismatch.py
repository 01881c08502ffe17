"""Ranks that do not agree on a collective, and differences that are legitimate."""

from __future__ import annotations

import numpy as np
import pytest

from dtobs.host.process import ProcessState
from dtobs.recording.laws import SPLITS
from dtobs.recording.meta import Op, Site
from dtobs.testing.fake_run import FakeRun
from tests.unit.detectors_hangs.trouble import found

SUM = Op("all_reduce", "sum", ((4, 8),), ("float32",))


def op(name: str = "all_reduce", reduce_op: str = "sum", shape: tuple[int, ...] = (4, 8), dtype: str = "float32"):
    return Op(name, reduce_op, (shape,), (dtype,))


@pytest.mark.parametrize(
    ("other", "code"),
    [
        (op(shape=(4, 9)), "shape-mismatch"),
        (op(dtype="float64"), "dtype-mismatch"),
        (op(reduce_op="max"), "reduce-op-mismatch"),
        (op(reduce_op="avg", shape=(4, 9)), "shape-mismatch"),  # it aborts ranks, which another reduction never does
        (op("broadcast", ""), "collective-mismatch"),
    ],
)
def test_the_minority_is_named_without_a_stall(training, other, code):
    run = training(3)
    for number in (0, 1, 2):
        run.rank(number).collective(other if number == 1 else SUM, site=Site("model.py", 40 + number, "sync"))
    for rank in run.ranks:
        rank.step()
    (finding,) = found(run.view(later=1)).values()
    assert (finding.code, finding.ranks, finding.confidence) == (code, (1,), "certain")
    assert f"rank 1 called {other} at model.py:41 in sync, but ranks 0 and 2 called {SUM}" in finding.summary
    assert "#21 of group default" in finding.summary


def deals(run: FakeRun, sent: list[list[int]], taken: list[list[int]]) -> None:
    """Each rank makes an all-to-all that sends and takes so many elements to and from each, and waits."""
    for rank, to, from_ in zip(run.ranks, sent, taken, strict=True):
        rank.collective(Op("all_to_all", "", (), ("float32",)), site=Site("moe.py", 7, "dispatch"), wait=True)
        record = np.zeros((), SPLITS.dtype)
        record["group"], record["seq"] = run.group(), rank.seqs[run.group()]
        record["sent"], record["taken"] = -1, -1
        record["sent"][: len(to)], record["taken"][: len(from_)] = to, from_
        rank.recorder.law(SPLITS).append(record)


def test_an_all_to_all_that_does_not_deal_what_is_taken(training):
    run = training(3)
    deals(run, [[4, 4, 4], [6, 4, 2], [4, 4, 4]], [[4] * 3] * 3)
    (finding,) = found(run.view(later=61)).values()
    assert (finding.code, finding.ranks, finding.confidence) == ("shape-mismatch", (1,), "certain")
    assert finding.summary == (
        "different sizes at #21 of group default, all_to_all() at moe.py:7 in dispatch: "
        "rank 1 sends 6 elements to rank 0, which takes 4; rank 1 sends 2 elements to rank 2, which takes 4"
    )
    assert "exchange their counts" in finding.next_step
    two = training(2)
    deals(two, [[1, 2], [3, 4]], [[1, 3], [1, 4]])
    (finding,) = found(two.view(later=61)).values()
    assert (finding.ranks, finding.confidence) == ((0, 1), "likely")


def test_an_all_to_all_that_deals_unevenly_is_right(training):
    run = training(2)
    deals(run, [[3, 1], [0, 4]], [[3, 0], [1, 4]])
    assert "shape-mismatch" not in found(run.view(later=61))


EVALUATES = Site("eval.py", 5, "evaluate")


@pytest.mark.parametrize(("aside", "before", "told"), [(2, 0, True), (0, 0, False), (2, 1, False)])
def test_lines_tell_since_when_a_rank_has_gone_another_way(training, aside: int, before: int, told: bool):
    run = training(3)
    train = [Site("train.py", 10 + n, "step") for n in range(3)]
    for line in [train[0], train[0], *([None] * before), train[0], *([None] * aside)]:
        for rank in run.ranks:
            rank.collective(SUM, site=line or (EVALUATES if rank.number == 1 else train[1]))
    for rank in run.ranks:
        rank.collective(op(shape=(5,)) if rank.number == 1 else SUM, site=train[0 if rank.number == 1 else 2])
    finding = found(run.view(later=1))["shape-mismatch"]
    since = "; rank 1 had gone another way since #24, which came from eval.py:5 in evaluate there and from train.py:11"
    assert (f"{since} in step on ranks 0 and 2" in finding.summary) is told
    assert ("another way" in finding.summary) is told


@pytest.mark.parametrize("steps_later", [0, 1])
def test_an_abort_a_few_calls_later_is_the_mismatchs_only_in_its_step(training, steps_later: int):
    """Gloo lets small broadcasts of other sizes pass before it aborts a rank."""
    run = training(2)
    for rank in run.ranks:
        rank.collective(op("broadcast", "", shape=(4, 8 + rank.number)))
        for _ in range(steps_later):
            rank.step()
        for _ in range(3):
            rank.collective(op("broadcast", ""))
    view = run.view(later=1, processes={1: ProcessState(77, alive=False, exit_code=-6)})
    assert sorted(found(view)) == (["rank-dead", "shape-mismatch"] if steps_later else ["shape-mismatch"])


def test_those_who_came_first_are_no_majority(training):
    """Two ranks of six call something else; only one of the four that are right has arrived when somebody looks."""
    run = training(6)
    for number in (0, 1, 2):
        run.rank(number).collective(op(reduce_op="max") if number < 2 else SUM, wait=True)
    assert found(run.view(later=1)) == {}
    assert found(run.view(later=70))["reduce-op-mismatch"].ranks == (0, 1, 2)
    for number in (3, 4, 5):
        run.rank(number).collective(SUM, wait=True)
    assert found(run.view(later=1))["reduce-op-mismatch"].ranks == (0, 1)


def test_of_two_ranks_both_are_named_with_both_lines(training):
    run = training(2)
    run.rank(0).collective(SUM, site=Site("a.py", 1, "f"))
    run.rank(1).collective(op(shape=(5,)), site=Site("b.py", 2, "g"))
    finding = found(run.view(later=1))["shape-mismatch"]
    assert finding.ranks == (0, 1)
    assert "at a.py:1 in f" in finding.summary
    assert "at b.py:2 in g" in finding.summary
    assert finding.next_step.startswith("Make the order of collectives equal"), "two lines are two calls, not one"


def test_wrong_order_is_one_finding(training):
    run = training(2)
    run.rank(0).collective("all_reduce").collective("broadcast", wait=True)
    run.rank(1).collective("broadcast").collective("all_reduce", wait=True)
    (finding,) = found(run.view(later=100)).values()
    assert finding.code == "collective-mismatch"


def test_different_roots_do_not_match(training):
    run = training(2)
    run.rank(0).collective(Op("broadcast", "", ((4,),), ("float32",), root=0))
    run.rank(1).collective(Op("broadcast", "", ((4,),), ("float32",), root=1))
    assert list(found(run.view())) == ["collective-mismatch"]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (op(shape=(4, 8)), op(shape=(32,))),  # as many elements
        (op("all_to_all", "", (3,)), op("all_to_all", "", (5,))),
        (op("all_gather", "", (3,)), op("all_gather", "", (5,))),  # the run goes on: its backend allows it
        (op("scatter", "", (3,)), op("scatter", "", (12,))),
        (Op("barrier"), Op("barrier", dtypes=("uint8",))),
    ],
)
def test_legitimate_differences(training, left, right):
    run = training(2)
    run.rank(0).collective(left).collective(SUM)
    run.rank(1).collective(right).collective(SUM)
    assert found(run.view(later=1)) == {}


def test_uneven_gather_counts_where_the_run_stopped(training):
    run = training(3)
    for number, size in enumerate((3, 3, 5)):
        run.rank(number).collective(op("all_gather", "", (size,)), wait=True)
    (finding,) = found(run.view(later=61)).values()
    assert (finding.code, finding.ranks) == ("shape-mismatch", (2,))


def test_only_what_both_still_hold_is_compared(tmp_path):
    """Rank 1's ring has wrapped: what it lost is not held against it."""
    from dtobs.testing.fake_run import FakeRun

    run = FakeRun(tmp_path, 2)
    for rank in run.ranks:
        rank.step()
    for _ in range(20):
        run.rank(0).collective(SUM)
    run.rank(1).collective(SUM, seq=15)
    for _ in range(5):
        run.rank(1).collective(SUM)
    assert found(run.view(later=1)) == {}


def test_each_group_is_judged_for_itself(training):
    run = training(4)
    left, right = run.group("left", (0, 1)), run.group("right", (2, 3))
    for number in (0, 1):
        run.rank(number).collective("all_reduce", left)
    for number in (2, 3):
        run.rank(number).collective("all_gather", right)
    assert found(run.view(later=1)) == {}


def test_an_operation_whose_definition_is_not_read_yet_accuses_nobody(training):
    """Definitions are read once a look and the ring a moment later, which may hold a call that is new since."""
    run = training(2)
    run.rank(0).collective(Op("all_reduce", "sum", ((4,),), ("bfloat16",)))
    run.rank(1).collective(Op("all_reduce", "sum", ((4,),), ("float16",)))
    view = run.view(later=1)
    view.meta(0).ops.popitem()
    assert found(view) == {}
    assert list(found(run.view(later=1))) == ["dtype-mismatch"]


@pytest.mark.parametrize(
    ("begins", "micros", "said"),
    [
        ((1, 9, 17), (), ""),
        ((1, 9, 16), (), "; pass 2 over the data had 7 steps on rank 1, and 8 on rank 0"),
        (
            (1, 9, 16),
            (12,),
            "; in step 12 rank 1 went through 2 micro-batches where it usually takes 1, so it left out an",
        ),
    ],
)
def test_what_set_ranks_apart_long_before_their_calls_did_not_fit(tmp_path, begins, micros, said):
    run = FakeRun(tmp_path, 2)
    for rank in run.ranks:
        for step in (1, 9, 17) if rank.number == 0 else begins:
            order = {"shuffles": True, "seed": 0, "epoch": 0, "replicas": 2}
            rank.meta("pass", step=step, sampler=0, samples=80, **order)
        for step in range(20):
            rank.step(micro_batches=2 if rank.number and step in micros else 1).collective()
        rank.collective("barrier" if rank.number else "all_reduce", wait=True)
    (finding,) = found(run.view(later=61)).values()
    assert finding.code == "collective-mismatch"
    assert said in finding.summary
    assert ("gradients" in finding.next_step) is bool(said)
    assert ("over the data" in finding.summary or "micro-batches" in finding.summary) is bool(said)
