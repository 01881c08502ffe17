"""What NCCL RAS answers, as text and as JSON, twice so that lags are judged."""

from __future__ import annotations

from random import Random

from dtobs.ras import judge
from dtobs.ras.read import samples_of
from tests.fuzz.mutate import mutate_bytes
from tests.unit.ras.test_ras import AHEAD, BEHIND, DEAD, OK, document

SEEDS = [one.encode() for one in (AHEAD, BEHIND, DEAD, OK, document({0: 9, 1: 9, 2: 8}))]


def mutate(data: bytes, random: Random) -> bytes:
    """Change bytes."""
    return mutate_bytes(data, random)


def check(data: bytes) -> bool:
    """Nothing raises; whether there is a sample."""
    samples = list(samples_of(data.decode("utf-8", "replace"), "x"))
    for finding in judge([*samples, *samples])[0] if samples else ():
        finding.to_json()
    return bool(samples)
