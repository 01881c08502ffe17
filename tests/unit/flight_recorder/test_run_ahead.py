"""Dumps as NCCL writes them by default: hosts queue calls, and no entry says which of them its device has started."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from dtobs.findings import Confidence
from dtobs.flight_recorder import analyse_dumps, dumps_from_objects
from dtobs.testing.layout import JobLayout
from dtobs.testing.simulate import IN_ANY_GROUP, SimulatedFault, simulate
from dtobs.testing.synthetic_dumps import SimulatedJob, dumps_of
from tests.unit.flight_recorder.builders import call, dump

RANK = 13
LAYOUT = JobLayout(dp=3, tp=3, pp=3, layers=1)
FAULTS = [
    *(SimulatedFault(name, RANK, axis) for name in (*IN_ANY_GROUP, "dumps-missing") for axis in ("world", "tp", "dp")),
    SimulatedFault("group-deadlock", RANK),
    SimulatedFault("p2p-unmatched", RANK),
]
PAIR = {"0": [0, 1]}


def blind(fault: SimulatedFault | None, run_ahead: int) -> SimulatedJob:
    return SimulatedJob(LAYOUT, fault, entries=80, steps=5, stacks=True, timing=False, run_ahead=run_ahead)


@cache
def dumps(fault: SimulatedFault, run_ahead: int) -> dict[int, dict[str, Any]]:
    return dict(dumps_of(blind(fault, run_ahead)))


def findings(made: dict[int, dict[str, Any]]):
    return analyse_dumps(dumps_from_objects(made)).findings


def brief(made: dict[int, dict[str, Any]]):
    return [(f.code, f.ranks, f.confidence.value) for f in findings(made)]


@pytest.mark.parametrize("run_ahead", [0, 8])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.name}-{f.axis}")
def test_fault_has_one_verdict(fault: SimulatedFault, run_ahead: int):
    (found,) = findings(dumps(fault, run_ahead))
    same = {fault.name}
    if fault.name == "collective-mismatch" and run_ahead:
        # In place of a call or before it: with few calls after it they look the same.
        same.add("call-site-mismatch")
    code, ranks = blind(fault, run_ahead).expected or ("", ())
    assert found.code in same | {code}
    assert found.ranks == ranks
    unsure = fault.name in ("network-stalled", "device-stopped")
    assert found.confidence is Confidence.POSSIBLE if unsure else found.confidence is not Confidence.POSSIBLE


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.name}-{f.axis}")
def test_without_the_dump_of_the_culprit_nobody_is_accused(fault: SimulatedFault):
    found = findings({rank: made for rank, made in dumps(fault, 8).items() if rank != RANK})
    assert not [f for f in found if f.ranks and f.confidence is not Confidence.POSSIBLE]
    if fault.name in ("rank-not-joined", "dumps-missing"):
        assert [(f.code, f.confidence) for f in found] == [("dumps-missing", Confidence.CERTAIN)]


@pytest.mark.parametrize("run_ahead", [0, 8, 1000])
def test_healthy_job_has_no_finding(run_ahead: int):
    analysis = analyse_dumps(dumps_from_objects(dict(dumps_of(blind(None, run_ahead)))))
    assert (analysis.findings, analysis.notes) == ((), ())


def test_hosts_run_ahead_as_far_as_they_may():
    layout = JobLayout(dp=3, tp=1, pp=1)
    issued = simulate(layout, [SimulatedFault("rank-not-joined", 1, "dp")], steps=3, run_ahead=4).issued
    assert [sum(made.state != "completed" for made in calls) for calls in issued] == [5, 0, 5]
    assert [made.state for made in issued[0][-5:]] == ["started", *["scheduled"] * 4]


def queued(*calls: tuple[int, str]) -> list[dict[str, Any]]:
    return [call(seq, group=group, description="", state="scheduled") for seq, group in calls]


def done(*calls: tuple[int, str]) -> list[dict[str, Any]]:
    return [call(seq, group=group, description="") for seq, group in calls]


def test_the_wait_begins_in_the_call_that_nobody_queues_for():
    """Data × tensor parallel, rank 2 hung before its data-parallel call: groups a and d are whole and healthy."""
    a, b, c, d = {"a": [0, 1]}, {"b": [2, 3]}, {"c": [0, 2]}, {"d": [1, 3]}
    world = {"w": [0, 1, 2, 3]}
    made = {
        0: dump(done((1, "a"), (1, "c"), (1, "w"), (2, "a")) + queued((2, "c"), (2, "w"), (3, "a")), a | c | world),
        1: dump(
            done((1, "a"), (1, "d"), (1, "w"), (2, "a"), (2, "d")) + queued((2, "w"), (3, "a"), (3, "d")),
            a | d | world,
        ),
        2: dump(done((1, "b"), (1, "c"), (1, "w"), (2, "b")), b | c | world),
        3: dump(
            done((1, "b"), (1, "d"), (1, "w"), (2, "b"), (2, "d")) + queued((2, "w"), (3, "b"), (3, "d")),
            b | d | world,
        ),
    }
    (found,) = findings(made)
    assert (found.code, found.ranks, found.confidence) == ("rank-not-joined", (2,), Confidence.CERTAIN)
    assert found.summary.startswith("rank 2 has not issued all_reduce [4] Float #2 of group c, in which rank 0 waits")
    del made[2]
    (found,) = findings(made)
    assert (found.code, found.confidence) == ("dumps-missing", Confidence.CERTAIN)
    assert found.summary.endswith("the dumps of rank 2 are missing; rank 0 waits in all_reduce [4] Float #2 of group c")


def test_groups_called_in_different_orders():
    """Both have issued both calls; each device waits in the one that the other has queued."""
    groups = {"a": [0, 1], "b": [0, 1]}
    usual = [(seq, group) for seq in (1, 2, 3) for group in "ab"]
    zero = dump(done(*usual) + queued((4, "a"), (4, "b")), groups)
    one = dump(done(*usual) + queued((4, "b"), (4, "a")), groups)
    assert brief({0: zero, 1: one}) == [("group-deadlock", (1,), "likely")]


def test_order_alone_is_no_proof_of_a_deadlock():
    groups = {"a": [0, 1], "b": [0, 1]}
    zero = dump(queued((1, "a"), (1, "b")), groups)
    one = dump(queued((1, "b"), (1, "a")), groups)
    assert brief({0: zero, 1: one}) == [("group-deadlock", (0, 1), "possible")]


def test_a_circle_that_a_queued_call_leads_out_of_is_none():
    """Of groups with streams of their own: 0 may wait in b, for a rank that has stopped."""
    zero = dump(queued((1, "a"), (1, "b")), {"a": [0, 1], "b": [0, 2]})
    one = dump(queued((1, "c")), {"a": [0, 1], "c": [0, 1]})
    assert brief({0: zero, 1: one, 2: dump([], {"b": [0, 2]})}) == [("rank-not-joined", (2,), "certain")]


def test_a_ring_of_batches_that_stands_still_accuses_nobody():
    """Each sends to the next and receives from the one before, in one batch: the order within says nothing."""
    ring = {"0": [0, 1, 2]}
    made = {
        rank: dump(
            [
                call(0, f"nccl:send {rank}->{(rank + 1) % 3}", state="scheduled", p2p=True),
                call(0, f"nccl:recv {rank}<-{(rank - 1) % 3}", state="scheduled", p2p=True),
            ],
            ring,
        )
        for rank in range(3)
    }
    assert brief(made) == [("network-stalled", (), "possible")]


def test_a_device_that_does_not_say_what_it_started():
    stuck = dump(done((1, "0")) + queued((2, "0"), (3, "0")), PAIR)
    (found,) = findings({0: stuck, 1: stuck})
    assert (found.code, found.ranks, found.confidence) == ("network-stalled", (), Confidence.POSSIBLE)
    assert "ranks 0 and 1 all issued all_reduce [4] Float #2 of group 0 and none completes" in found.summary
    assert "a device that never started it" in found.summary


def test_a_rank_that_finished_a_call_and_waits_in_a_later_one_is_counted_once():
    four = {"0": [0, 1, 2, 3]}
    ahead = dump([call(1), call(2, "nccl:broadcast"), call(3, state="scheduled")], four)
    others = dump([call(1), call(2, "nccl:broadcast", state="scheduled")], four)
    (found,) = findings({0: ahead, 1: others, 2: others, 3: others})
    assert "ranks 0-3 all issued broadcast [4] Float #2 of group 0 (default_pg) and" in found.summary
    assert "and 3 of them do not complete it" in found.summary


@pytest.mark.parametrize("world", [3, 8])
def test_a_rank_that_waits_alone_in_its_ordinary_next_call_is_innocent(world: int):
    """The others are held up outside, for example by their storage; or they had a step less to do."""
    ranks = {"0": list(range(world))}
    past = [call(n, site=site) for n, site in enumerate(["fwd", "bwd", "clip"] * 5, 1)]
    waits = dump([*past, call(16, site="fwd", state="scheduled")], ranks)
    (found,) = findings({0: waits, **{rank: dump(past, ranks) for rank in range(1, world)}})
    assert (found.code, found.confidence) == ("rank-not-joined", Confidence.POSSIBLE)
    assert found.ranks == tuple(range(1, world))
    assert found.summary.endswith("; or rank 0 went a step further than meant")


def test_a_call_that_is_new_and_made_by_one_rank_accuses_nobody():
    """One call too many, or a new phase that the others are held up before: the dumps do not tell."""
    past = [call(n, site=site) for n, site in enumerate(["fwd", "bwd", "clip"] * 5, 1)]
    waits = dump([*past, call(16, site="evaluate", state="scheduled")], {"0": [0, 1, 2]})
    other = dump(past, {"0": [0, 1, 2]})
    (found,) = findings({0: waits, 1: other, 2: other})
    assert (found.code, found.ranks, found.confidence) == ("collective-mismatch", (), Confidence.POSSIBLE)
    assert "which none of the other 2 ranks issued: a call more than its peers make" in found.summary
