"""Faults in jobs of several kinds of parallelism: the rank is found, and nobody is ever accused for another."""

from __future__ import annotations

import random

import pytest

from dtobs.findings import Confidence
from dtobs.flight_recorder import analyse_dumps, dumps_from_objects
from tests.unit.flight_recorder.hybrids import Kind, standstill

CODES: dict[Kind, set[str]] = {
    "host": {"rank-not-joined"},
    "size": {"shape-mismatch"},
    "device": {"device-stopped"},
    "left-out": {"rank-not-joined", "group-deadlock", "p2p-unmatched", "shape-mismatch", "call-site-mismatch"},
}


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("kind", CODES)
def test_the_rank_is_found(kind: Kind, seed: int):
    made = standstill(seed, kind)
    found = analyse_dumps(dumps_from_objects(made.dumps)).findings
    assert found[0].code in CODES[kind]
    if found[0].confidence is Confidence.POSSIBLE or found[0].code == "p2p-unmatched":  # of two that exchange messages
        assert kind == "left-out"
        assert made.rank in found[0].ranks
    else:
        assert found[0].ranks == (made.rank,)


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("kind", CODES)
def test_without_the_dump_of_another_rank_nobody_is_accused_for_it(kind: Kind, seed: int):
    made = standstill(seed, kind)
    del made.dumps[random.Random(seed).choice([rank for rank in made.dumps if rank != made.rank])]
    for found in analyse_dumps(dumps_from_objects(made.dumps)).findings:
        if found.confidence is not Confidence.POSSIBLE and found.code != "dumps-missing":
            pair = found.code == "p2p-unmatched" and made.rank in found.ranks
            assert pair or found.ranks in ((), (made.rank,))
