"""One job, told by its recordings, its Flight Recorder dumps, its console and NCCL RAS: one verdict.

It is surer where there is more evidence, and where a source cannot see what is wrong it accuses nobody else.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from dtobs.detectors.hangs import detect
from dtobs.diagnose.analyse import rank_causes
from dtobs.findings import Confidence, Finding
from dtobs.flight_recorder import analyse_dumps, dumps_from_objects
from dtobs.recording.meta import Op
from dtobs.testing import recorded, synthetic_dumps
from dtobs.testing.fake_run import FakeRun
from dtobs.testing.layout import JobLayout
from dtobs.testing.recorded import recording_of
from dtobs.testing.simulate import SimulatedFault, SimulatedRun, simulate
from dtobs.testing.synthetic_dumps import SimulatedJob, dumps_of
from tests.unit.calls.sources import from_console, from_ras

LESS = {
    "console": (from_console, {"collective-mismatch", "shape-mismatch", "rank-not-joined", "network-stalled"}),
    "RAS": (from_ras, {"collective-mismatch", "rank-not-joined", "network-stalled"}),
}
"""What tells less, and the codes that it can tell."""
FOUR = JobLayout(dp=4, tp=1, pp=1)
SMALL = JobLayout(dp=2, tp=2, pp=2)
TENSORS = JobLayout(dp=2, tp=2, pp=1)
ABSENT = {
    "from a tensor-parallel group": (TENSORS, SimulatedFault("rank-not-joined", 2, "tp"), None),
    "from a data-parallel group": (TENSORS, SimulatedFault("rank-not-joined", 3, "dp"), None),
    "two, from different calls": (
        TENSORS,
        SimulatedFault("rank-not-joined", 1, "tp"),
        SimulatedFault("rank-not-joined", 2, "dp"),
    ),
    "two, one waited for by the other": (
        FOUR,
        SimulatedFault("rank-not-joined", 1, "dp"),
        SimulatedFault("rank-not-joined", 2),
    ),
}
SIBLINGS = {
    "their data-parallel groups": (TENSORS, SimulatedFault("rank-not-joined", 0, "dp"), (1, "dp")),
    "their tensor-parallel groups": (TENSORS, SimulatedFault("rank-not-joined", 0, "tp"), (2, "tp")),
    "data-parallel groups, at two places of the mesh": (
        JobLayout(dp=4, tp=2, pp=1),
        SimulatedFault("rank-not-joined", 2, "dp"),
        (5, "dp"),
    ),
    "groups of several pipeline stages": (SMALL, SimulatedFault("rank-not-joined", 4, "dp"), (5, "dp")),
}
FAULTS = [
    None,
    SimulatedFault("collective-mismatch", 2, "dp"),
    SimulatedFault("shape-mismatch", 2, "dp"),
    SimulatedFault("dtype-mismatch", 2, "dp"),
    SimulatedFault("call-site-mismatch", 2, "dp"),
    SimulatedFault("rank-not-joined", 2, "dp"),
    SimulatedFault("rank-not-joined", 2),
    SimulatedFault("network-stalled", 2, "dp"),
]
ON_PIPELINES = [
    None,
    SimulatedFault("group-deadlock", 1),
    SimulatedFault("p2p-unmatched", 1),
    SimulatedFault("rank-not-joined", 5, "tp"),
    SimulatedFault("network-stalled", 3, "dp"),
]


def verdicts(job: SimulatedJob, folder: Path) -> tuple[Finding | None, Finding | None]:
    """The first finding from the recordings, and from the dumps."""
    from_dumps = analyse_dumps(dumps_from_objects(dict(dumps_of(job)))).findings
    from_recording = rank_causes(detect(recording_of(job, folder)))
    return next(iter(from_recording), None), next(iter(from_dumps), None)


def number(finding: Finding) -> str:
    """The number that a call has in its group."""
    return finding.summary.partition("#")[2].split()[0]


def agree(job: SimulatedJob, folder: Path) -> Finding | None:
    recording, dumps = verdicts(job, folder)
    if recording is None or dumps is None:
        assert recording is None and dumps is None, (recording, dumps)
        return None
    assert recording.code == dumps.code, (recording.summary, dumps.summary)
    assert recording.code == "network-stalled" or recording.ranks == dumps.ranks, (recording.summary, dumps.summary)
    assert recording.confidence.order >= dumps.confidence.order
    return recording


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.name}-{f.axis}" if f else "healthy")
def test_four_replicas(fault: SimulatedFault | None, tmp_path: Path) -> None:
    job = SimulatedJob(FOUR, fault, steps=12, simulated_steps=6)
    found = agree(job, tmp_path)
    assert (found.code if found else None) == (fault.name if fault else None)
    if fault and fault.name != "network-stalled":
        assert found is not None and found.ranks == (2,)


@pytest.mark.parametrize("source", LESS)
@pytest.mark.parametrize("fault", FAULTS[1:], ids=lambda f: f"{f.name}-{f.axis}")
def test_less_evidence_tells_the_same_or_less(fault: SimulatedFault, source: str, tmp_path: Path) -> None:
    read, codes = LESS[source]
    job = SimulatedJob(FOUR, fault, steps=12, simulated_steps=6)
    _, more = verdicts(job, tmp_path / "recording")
    less = read(job, tmp_path / source)
    assert more is not None and less is not None
    assert less.confidence.order <= more.confidence.order, less.summary
    if fault.name in codes:
        assert (less.code, less.ranks) == (more.code, more.ranks), less.summary
    elif less.ranks:  # what it sees is where a call more or fewer ended
        assert (fault.name, less.code, less.ranks) == ("call-site-mismatch", "shape-mismatch", more.ranks)
    else:
        assert (less.code, less.confidence) == ("network-stalled", Confidence.POSSIBLE)


@pytest.mark.parametrize("case", ABSENT)
def test_the_call_that_a_rank_is_absent_from_is_one(case: str, tmp_path: Path) -> None:
    """Recordings and dumps name the same rank and the same call; the console and RAS accuse nobody else."""
    layout, fault, second = ABSENT[case]
    job = SimulatedJob(layout, fault, second, steps=12, simulated_steps=6)
    found = agree(job, tmp_path)
    assert found is not None
    assert (found.code, found.ranks) == ("rank-not-joined", (fault.rank,))
    _, dumps = verdicts(job, tmp_path / "again")
    assert dumps is not None and number(found) == number(dumps)
    for name, (read, _) in LESS.items():
        less = read(job, tmp_path / name)
        assert less is not None and less.ranks in ((), found.ranks), less.summary
        assert less.confidence.order <= found.confidence.order


@pytest.mark.parametrize("case", SIBLINGS)
def test_ranks_absent_from_sibling_groups_are_one_finding(case: str, tmp_path: Path) -> None:
    """Recordings and dumps have one finding with both ranks; the console and RAS name them or some of them."""
    layout, fault, (second, axis) = SIBLINGS[case]
    job = SimulatedJob(layout, fault, SimulatedFault("rank-not-joined", second, axis), steps=12, simulated_steps=6)
    found = agree(job, tmp_path)
    assert found is not None
    assert (found.code, found.ranks) == ("rank-not-joined", (fault.rank, second))
    (from_dumps,) = analyse_dumps(dumps_from_objects(dict(dumps_of(job)))).findings
    assert len(rank_causes(detect(recording_of(job, tmp_path / "again")))) == 1
    assert from_dumps.confidence is Confidence.CERTAIN
    for name, (read, _) in LESS.items():
        less = read(job, tmp_path / name)
        assert less is not None and set(less.ranks) <= set(found.ranks), less.summary
        assert less.confidence.order <= from_dumps.confidence.order


def test_one_sample_of_ras_is_a_guess(tmp_path: Path) -> None:
    for number, fault in enumerate(FAULTS[1:]):
        found = from_ras(SimulatedJob(FOUR, fault, steps=12, simulated_steps=6), tmp_path / str(number), samples=1)
        assert found is None or found.confidence is Confidence.POSSIBLE, found.summary


def test_a_healthy_job_is_healthy_on_its_console(tmp_path: Path) -> None:
    assert from_console(SimulatedJob(FOUR, steps=12, simulated_steps=6), tmp_path / "console") is None


@pytest.mark.parametrize("fault", ON_PIPELINES, ids=lambda f: f"{f.name}-{f.axis}" if f else "healthy")
def test_a_pipeline(fault: SimulatedFault | None, tmp_path: Path) -> None:
    found = agree(SimulatedJob(SMALL, fault, steps=6), tmp_path)
    assert (found.code if found else None) == (fault.name if fault else None)


@pytest.mark.parametrize(
    ("operations", "ranks", "confidence"),
    [
        (("all_reduce", "all_reduce", "broadcast", "all_gather"), (0, 1, 2, 3), Confidence.LIKELY),
        (("all_reduce", "all_reduce", "all_reduce", "all_gather"), (3,), Confidence.CERTAIN),
        (("all_reduce", "all_reduce", "broadcast", "broadcast"), (0, 1, 2, 3), Confidence.LIKELY),
    ],
)
def test_a_majority_is_more_than_half(
    operations: tuple[str, ...], ranks: tuple[int, ...], confidence: Confidence, tmp_path: Path
) -> None:
    """The fourth call of four ranks is not the same: only what more than half of them call is taken for meant."""

    def simulated(layout: JobLayout, faults: object, steps: int, run_ahead: int = 0) -> SimulatedRun:
        outcome = simulate(layout, (), steps, run_ahead)
        for rank, issued in enumerate(outcome.issued):
            last = issued[3]
            shown = type(last.call)(last.call.axis, operations[rank], last.call.size, last.call.site, last.call.dtype)
            issued[3:] = [type(last)(shown, "started", last.step)]
        return outcome

    with mock.patch.object(recorded, "simulate", simulated), mock.patch.object(synthetic_dumps, "simulate", simulated):
        found = agree(SimulatedJob(FOUR, steps=3, simulated_steps=3), tmp_path)
    assert found is not None
    assert (found.code, found.ranks, found.confidence) == ("collective-mismatch", ranks, confidence)


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("simulated_steps", [2, 3, 6])
def test_a_call_too_many(world: int, simulated_steps: int, tmp_path: Path) -> None:
    """It is proved by the calls after it, or, of many ranks, by the mismatch soon after it; of two there are none."""
    layout = JobLayout(dp=world, tp=1, pp=1)
    job = SimulatedJob(layout, SimulatedFault("call-site-mismatch", 1, "dp"), steps=12, simulated_steps=simulated_steps)
    found = agree(job, tmp_path)
    assert found is not None
    proved = world > 2
    assert (found.code, found.ranks) == (("call-site-mismatch", (1,)) if proved else ("shape-mismatch", (0, 1)))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("extra", [True, False])
def test_a_call_too_many_that_stops_nothing(world: int, extra: bool, tmp_path: Path) -> None:
    """All of the calls are alike, so that none of them fails; and the healthy twin has a line of a rank's own."""

    def simulated(layout: JobLayout, faults: object, steps: int, run_ahead: int = 0) -> SimulatedRun:
        outcome = simulate(layout, (), steps, run_ahead)
        for rank, issued in enumerate(outcome.issued):
            for place, made in enumerate(issued):
                own = "train.py:7:rank_one" if (rank, place % 3, extra) == (1, 1, False) else f"train.py:{place % 3}1:f"
                issued[place] = replace(made, call=replace(issued[0].call, site=own))
            if extra and rank == 1:
                odd = replace(issued[0], call=replace(issued[0].call, site="metrics.py:14:average"))
                issued[5:] = [replace(odd, step=issued[5].step), *issued[5:-1]]
        return outcome

    with mock.patch.object(recorded, "simulate", simulated), mock.patch.object(synthetic_dumps, "simulate", simulated):
        found = agree(SimulatedJob(JobLayout(dp=world, tp=1, pp=1), steps=8, simulated_steps=8), tmp_path)
    assert ((found.code, found.ranks) if found else None) == (("call-site-mismatch", (1,)) if extra else None)


@pytest.mark.parametrize("kind", ["max", "sum"])
def test_a_reduction_of_another_kind_is_seen_in_recordings_alone(kind: str, tmp_path: Path) -> None:
    """No Flight Recorder knows the operation of a reduction, so its dumps say nothing rather than something else."""
    run = FakeRun(tmp_path, world=2)
    for rank in run.ranks:
        rank.collective(Op("all_reduce", kind if rank.number else "sum", ((4,),), ("float32",))).step()
    codes = [f.code for f in detect(run.view())]
    assert codes == (["reduce-op-mismatch"] if kind == "max" else [])
    assert not analyse_dumps(dumps_from_objects(dict(dumps_of(SimulatedJob(FOUR, steps=12))))).findings


def test_devices_stopped_in_two_groups_are_one_verdict() -> None:
    job = SimulatedJob(
        SMALL, SimulatedFault("device-stopped", 1, "tp"), second=SimulatedFault("device-stopped", 6, "tp"), steps=6
    )
    (finding,) = analyse_dumps(dumps_from_objects(dict(dumps_of(job)))).findings
    assert (finding.code, finding.ranks) == ("device-stopped", (1, 6))
