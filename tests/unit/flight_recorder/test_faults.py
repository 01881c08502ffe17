"""Every fault of the generator gets its verdict, its healthy twin none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtobs.findings import Confidence
from dtobs.flight_recorder import analyse_dumps, dumps_from_objects
from dtobs.testing.layout import JobLayout
from dtobs.testing.simulate import IN_ANY_GROUP, SimulatedFault
from dtobs.testing.synthetic_dumps import SimulatedJob, dumps_of

CUBE = JobLayout(dp=4, tp=4, pp=4)
FAULTS = [
    *(SimulatedFault(name, 21, axis) for name in IN_ANY_GROUP for axis in ("world", "tp", "dp")),
    *(SimulatedFault("dumps-missing", 21, axis) for axis in ("world", "tp", "dp")),
    SimulatedFault("group-deadlock", 21),
    SimulatedFault("p2p-unmatched", 21),
]
AMONG_A_THOUSAND = {"rank-not-joined", "shape-mismatch", "dumps-missing", "p2p-unmatched"}
"""A rank that is absent, one that disagrees, one that is unknown, a pipeline; 64 ranks have every fault."""
LARGE = JobLayout(dp=32, tp=8, pp=4, layers=1, micro_batches=1)
PAIRS = [
    (SimulatedFault("rank-not-joined", 1, "tp"), SimulatedFault("rank-not-joined", 38, "tp")),
    (SimulatedFault("rank-not-joined", 1, "tp"), SimulatedFault("shape-mismatch", 38, "tp")),
    (SimulatedFault("device-stopped", 1, "tp"), SimulatedFault("dtype-mismatch", 38, "tp")),
    (SimulatedFault("collective-mismatch", 1, "tp"), SimulatedFault("p2p-unmatched", 38)),
]
"""Faults that do not keep each other from showing: of different replicas, before these have to meet."""


def analyse(job: SimulatedJob):
    return analyse_dumps(dumps_from_objects(dict(dumps_of(job))))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.name}-{f.axis}")
def test_fault_has_one_verdict(fault: SimulatedFault):
    job = SimulatedJob(CUBE, fault, entries=120, steps=6)
    findings = analyse(job).findings
    assert [(f.code, f.ranks) for f in findings] == [job.expected]
    assert findings[0].confidence is not Confidence.POSSIBLE
    assert findings[0].evidence[0]["entries"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            replace(f, rank=341), id=f.name, marks=() if f.name in AMONG_A_THOUSAND else pytest.mark.exhaustive
        )
        for f in FAULTS
        if f.axis == "dp" or not f.name.startswith(IN_ANY_GROUP)
    ],
)
def test_fault_among_a_thousand_ranks(fault: SimulatedFault):
    job = SimulatedJob(LARGE, fault, entries=40, steps=3, simulated_steps=2)
    assert [(f.code, f.ranks) for f in analyse(job).findings] == [job.expected]


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda f: f.name)
def test_two_faults_at_once(one: SimulatedFault, other: SimulatedFault):
    found = analyse(SimulatedJob(CUBE, one, other, entries=120, steps=6)).findings
    sure = {(f.code, f.ranks) for f in found if f.confidence is not Confidence.POSSIBLE}
    if one.name == other.name:  # ranks absent from sibling groups are one finding
        assert sure == {(one.name, (one.rank, other.rank))}
    else:
        assert sure == {one.expected(CUBE), other.expected(CUBE)}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.name}-{f.axis}")
def test_fault_without_stacks(fault: SimulatedFault):
    """JSON dumps have no call sites: a silent desynchronisation then shows by its consequence, on the same rank."""
    job = SimulatedJob(CUBE, fault, entries=120, steps=6, stacks=False)
    findings = [f for f in analyse(job).findings if f.confidence is not Confidence.POSSIBLE]
    if fault.name == "call-site-mismatch":
        assert all(f.ranks == (fault.rank,) for f in findings)
    else:
        assert [(f.code, f.ranks) for f in findings] == [job.expected]


@pytest.mark.parametrize(
    "layout", [CUBE, JobLayout(8, 1, 1), JobLayout(1, 8, 1), JobLayout(1, 1, 8), JobLayout(1, 1, 2)], ids=str
)
@pytest.mark.parametrize(("entries", "steps"), [(10_000, 12), (300, 40), (37, 40)])
def test_healthy_job_has_no_finding(layout: JobLayout, entries: int, steps: int):
    """The rings of a pipeline's stages wrap at different steps, as their steps have different numbers of calls."""
    analysis = analyse(SimulatedJob(layout, None, entries=entries, steps=steps))
    assert (analysis.findings, analysis.notes, analysis.missing_ranks) == ((), (), ())
    assert analysis.world_size == layout.world_size == len(analysis.ranks)


@pytest.mark.parametrize("world", [2, 3])
def test_small_world(world: int):
    fault = SimulatedFault("rank-not-joined", 1)
    job = SimulatedJob(JobLayout(dp=world, tp=1, pp=1), fault, entries=50, steps=10)
    (finding,) = analyse(job).findings
    assert (finding.code, finding.ranks) == job.expected


def test_two_ranks_that_disagree_are_both_named():
    job = SimulatedJob(JobLayout(dp=2, tp=1, pp=1), SimulatedFault("shape-mismatch", 1, "dp"), entries=50, steps=10)
    (finding,) = analyse(job).findings
    assert (finding.code, finding.ranks, finding.confidence) == ("shape-mismatch", (0, 1), Confidence.LIKELY)
    assert "rank 0 called all_reduce [4096, 1024] Float at /app/buckets.py:30 in reduce" in finding.summary
    assert "rank 1 called all_reduce [4096, 1031] Float at /app/buckets.py:30 in reduce" in finding.summary


def test_summary_says_who_where_and_what_instead():
    job = SimulatedJob(JobLayout(dp=4, tp=1, pp=1), SimulatedFault("rank-not-joined", 2, "dp"), entries=50, steps=10)
    (finding,) = analyse(job).findings
    assert finding.summary == (
        "rank 2 has not issued all_reduce [4096, 1024] Float #33 of group 1 (mesh_dp), in which ranks 0, 1 and 3 wait"
        " at /app/buckets.py:30 in reduce; the last it called was all_reduce [1] Float #8 of group 0 (default_pg) at"
        " /app/clip.py:19 in global_norm"
    )
    assert finding.group == "1 (mesh_dp)"


def test_ranks_of_a_lost_host_are_one_finding():
    dumps = dict(dumps_of(SimulatedJob(CUBE, SimulatedFault("rank-not-joined", 21, "world"), entries=120, steps=6)))
    for rank in (22, 23):  # they stop where 21 did: their call of the world group never happened
        dumps[rank]["entries"] = [e for e in dumps[rank]["entries"] if e["state"] == "completed"]
    (finding,) = analyse_dumps(dumps_from_objects(dumps)).findings
    assert (finding.code, finding.ranks) == ("rank-not-joined", (21, 22, 23))


def test_two_faults_at_once_are_two_findings():
    """Two replicas that share nothing but the world: each has its own stuck rank."""
    layout = JobLayout(dp=2, tp=4, pp=1)
    one = dict(dumps_of(SimulatedJob(layout, SimulatedFault("rank-not-joined", 1, "tp"), entries=120, steps=6)))
    two = dict(dumps_of(SimulatedJob(layout, SimulatedFault("rank-not-joined", 6, "tp"), entries=120, steps=6)))
    both = {rank: (one if rank < 4 else two)[rank] for rank in range(8)}
    findings = analyse_dumps(dumps_from_objects(both)).findings
    assert {r for f in findings for r in f.ranks} == {1, 6}


def test_frontier_table():
    job = SimulatedJob(JobLayout(dp=4, tp=1, pp=1), SimulatedFault("rank-not-joined", 2, "dp"), entries=50, steps=10)
    rows = analyse(job).ranks
    assert [row.rank for row in rows] == [0, 1, 2, 3]
    assert rows[2].waits_in is None
    assert rows[0].to_json() == {
        "state": "waiting",
        "last_collective": "all_reduce [4096, 1024] Float #33 of group 1 (mesh_dp)",
        "site": "/app/buckets.py:30 in reduce",
        "waits_in": "all_reduce [4096, 1024] Float #33 of group 1 (mesh_dp)",
    }


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (SimulatedFault("rank-not-joined", 99), "there is no rank 99 among 8"),
        (SimulatedFault("rank-not-joined", 1, "pp"), "no group along pp"),
        (SimulatedFault("p2p-unmatched", 1), "not on the last pipeline stage"),
    ],
)
def test_generator_refuses_what_has_no_room(fault: SimulatedFault, message: str):
    with pytest.raises(ValueError, match=message):
        dict(dumps_of(SimulatedJob(JobLayout(dp=8, tp=1, pp=1), fault)))
