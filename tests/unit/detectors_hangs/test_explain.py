"""Rules in order: what one has accounted for, the next ones do not see."""

from __future__ import annotations

import pytest

from dtobs.detectors.hangs import RULES, explain
from dtobs.detectors.hangs.situation import interpret
from dtobs.host.process import ProcessState
from dtobs.recording.meta import Op


def left_to_each(situation):
    """The ranks that each rule is given, and those that remain after the last."""
    left, given = frozenset(situation.view.ranks), []
    for rule in RULES:
        given.append(left)
        left -= rule(situation, left).ranks
    return [*given, left]


def test_of_three_causes_each_is_told_once_and_who_waits_is_left_to_nobody(training):
    run = training(5)
    run.rank(0).collective(wait=True)
    run.rank(1).phase("forward")
    run.rank(2).phase("data")
    run.rank(3).phase("forward")
    run.rank(4).collective(wait=True)
    situation = interpret(run.view(later=400, processes={1: ProcessState(4242, alive=True, state="T")}))
    assert {f.code: f.ranks for f in explain(situation)} == {
        "rank-stopped": (1,),
        "stuck-in-dataloader": (2,),
        "rank-not-joined": (3,),
    }
    given = left_to_each(situation)
    assert given[0] == {0, 1, 2, 3, 4}
    assert set(given) == {given[0], frozenset({2, 3}), frozenset({3}), frozenset()}


@pytest.mark.parametrize("later", [0, 400])
def test_a_disagreement_that_stops_nothing_accounts_for_nobody(training, later):
    run = training(3)
    for rank in run.ranks:
        rank.collective(Op("all_reduce", "max" if rank.number == 1 else "sum", ((4,),), ("float32",)))
    if later:
        run.rank(0).collective(wait=True)
        run.rank(1).collective(wait=True)
        run.rank(2).phase("forward")
    codes = {f.code: f.ranks for f in explain(interpret(run.view(later=later)))}
    assert codes == {"reduce-op-mismatch": (1,)} | ({"rank-not-joined": (2,)} if later else {})


def test_a_healthy_run_leaves_all_ranks(training):
    situation = interpret(training(3).view())
    assert explain(situation) == []
    assert set(left_to_each(situation)) == {frozenset({0, 1, 2})}
