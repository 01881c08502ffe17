"""A verdict depends on what happened, not on how the dumps came to us."""

from __future__ import annotations

import functools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtobs.findings import Confidence
from dtobs.flight_recorder import analyse_dumps, dumps_from_objects
from dtobs.testing.layout import JobLayout
from dtobs.testing.simulate import IN_ANY_GROUP, SimulatedFault
from dtobs.testing.synthetic_dumps import SimulatedJob, dumps_of

LAYOUT = JobLayout(dp=2, tp=2, pp=2)
FAULTS: list[SimulatedFault | None] = [
    None,
    *(SimulatedFault(name, 1, axis) for name in IN_ANY_GROUP for axis in ("world", "tp", "dp")),
    SimulatedFault("group-deadlock", 1),
    SimulatedFault("p2p-unmatched", 1),
]
CASES = {
    fault: dict(dumps_of(SimulatedJob(LAYOUT, fault, entries=120, steps=8, simulated_steps=3))) for fault in FAULTS
}
_faults = st.sampled_from(FAULTS)


def verdicts(dumps):
    return [(f.code, f.ranks, f.confidence, f.summary) for f in analyse_dumps(dumps_from_objects(dumps)).findings]


@functools.cache
def expected(fault: SimulatedFault | None):
    return verdicts(CASES[fault])


def accuses_no_innocent(
    fault: SimulatedFault, code: str, ranks: tuple[int, ...], confidence: Confidence, summary: str
) -> bool:
    """Two ranks that disagree between themselves are both named, and the summary says so."""
    guilty = set(fault.expected(LAYOUT)[1])
    tie = len(ranks) == 2 and fault.rank in ranks and ("different " in summary or "each other" in summary)
    return confidence is Confidence.POSSIBLE or set(ranks) <= guilty or tie


@settings(deadline=None, max_examples=40)
@given(_faults, st.randoms(use_true_random=False))
def test_order_of_files(fault: SimulatedFault | None, rng: random.Random):
    ranks = list(CASES[fault])
    rng.shuffle(ranks)
    assert verdicts({rank: CASES[fault][rank] for rank in ranks}) == expected(fault)


@settings(deadline=None, max_examples=40)
@given(_faults, st.randoms(use_true_random=False))
def test_order_of_entries_in_a_file(fault: SimulatedFault | None, rng: random.Random):
    shuffled = {}
    for rank, dump in CASES[fault].items():
        entries = list(dump["entries"])
        rng.shuffle(entries)
        shuffled[rank] = {**dump, "entries": entries}
    assert verdicts(shuffled) == expected(fault)


@settings(deadline=None, max_examples=40)
@given(_faults, st.randoms(use_true_random=False))
def test_names_of_groups(fault: SimulatedFault | None, rng: random.Random):
    numbers = {str(n): str(m) for n, m in enumerate(rng.sample(range(1000, 9999), 40))}
    renamed = {}
    for rank, dump in CASES[fault].items():
        entries = [
            {**entry, "process_group": (numbers[name], description)}
            for entry in dump["entries"]
            for name, description in [entry["process_group"]]
        ]
        groups = {numbers[name]: value for name, value in dump["pg_config"].items()}
        renamed[rank] = {**dump, "pg_config": groups, "entries": entries}
    assert [found[:2] for found in verdicts(renamed)] == [found[:2] for found in expected(fault)]


@settings(deadline=None, max_examples=40)
@given(_faults, st.lists(st.integers(-7200, 7200), min_size=8, max_size=8))
def test_clock_skew(fault: SimulatedFault | None, seconds: list[int]):
    job = SimulatedJob(LAYOUT, fault, entries=120, steps=8, clock_skew_ns={r: s * 10**9 for r, s in enumerate(seconds)})
    assert verdicts(dict(dumps_of(job))) == expected(fault)


@settings(deadline=None, max_examples=40)
@given(_faults, st.integers(0, 10**9))
def test_record_ids(fault: SimulatedFault | None, offset: int):
    """A rank that attached its recorder later has other record ids; nothing may rest on them across ranks."""
    moved = {}
    for rank, dump in CASES[fault].items():
        entries = [{**entry, "record_id": entry["record_id"] + offset * (rank + 1)} for entry in dump["entries"]]
        moved[rank] = {**dump, "entries": entries}
    assert verdicts(moved) == expected(fault)


@settings(deadline=None, max_examples=300)
@given(_faults, st.sets(st.integers(0, 7), min_size=1))
def test_any_subset_of_dumps_accuses_no_innocent(fault: SimulatedFault | None, kept: set[int]):
    found = verdicts({rank: CASES[fault][rank] for rank in kept})
    if fault is None:
        assert found == []
        return
    for finding in found:
        assert accuses_no_innocent(fault, *finding), finding


@pytest.mark.parametrize("fault", [f for f in FAULTS if f is not None], ids=lambda f: f"{f.name}-{f.axis}")
def test_a_missing_dump_alone_accuses_nobody(fault: SimulatedFault):
    dumps = {rank: dump for rank, dump in CASES[fault].items() if rank != fault.rank}
    analysis = analyse_dumps(dumps_from_objects(dumps))
    assert analysis.missing_ranks == (fault.rank,)
    assert all(fault.rank not in f.ranks for f in analysis.findings)
    if fault.name == "rank-not-joined":
        assert [f.code for f in analysis.findings] == ["dumps-missing"]
        assert f"the dumps of rank {fault.rank} are missing" in analysis.findings[0].summary


@settings(deadline=None, max_examples=60)
@given(_faults, st.dictionaries(st.integers(0, 7), st.integers(1, 119), min_size=1))
def test_wrapped_rings(fault: SimulatedFault | None, lost: dict[int, int]):
    """Rings that hold less of the past accuse nobody else."""
    cut = {rank: {**dump, "entries": dump["entries"][lost.get(rank, 0) :]} for rank, dump in CASES[fault].items()}
    for finding in verdicts(cut):
        assert fault is not None, finding
        assert accuses_no_innocent(fault, *finding), finding
