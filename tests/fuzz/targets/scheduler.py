"""What a scheduler says: `sacct` tables and Kubernetes events."""

from __future__ import annotations

from random import Random

from dtobs.logs.outside import rows_of
from tests.fuzz.mutate import mutate_bytes
from tests.unit.diagnose.test_folder import CANCELLED, EVENTS, PARSABLE, SACCT

SEEDS = [one.encode() for one in (SACCT, PARSABLE, CANCELLED, EVENTS)]
SEEDS.append(b'{"kind": "List", "items": [{"reason": "OOMKilling", "involvedObject": {"name": "n"}, "message": "m"}]}')


def mutate(data: bytes, random: Random) -> bytes:
    """Change bytes."""
    return mutate_bytes(data, random)


def check(data: bytes) -> bool:
    """Nothing raises; whether a row means something."""
    return bool(rows_of(data.decode("utf-8", "replace"), "x"))
