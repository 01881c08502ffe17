"""Stacks by py-spy, faulthandler and the debug server, of one rank and of several in one text."""

from __future__ import annotations

from random import Random

from dtobs.stacks import RankStack, judge
from dtobs.stacks.read import stacks_of
from tests.fuzz.mutate import mutate_bytes
from tests.unit.stacks.test_read import FORMS, IN_CODE, IN_REDUCE, faulthandler_text, pyspy_text

SEEDS = [form(frames).encode() for form in FORMS.values() for frames in (IN_CODE, IN_REDUCE)]
SEEDS += [
    "".join(f"=== Rank {rank}: http://h:{rank} ===\n{pyspy_text(IN_REDUCE)}\n" for rank in range(3)).encode(),
    "".join(faulthandler_text(IN_CODE if rank else IN_REDUCE, f"[rank{rank}]: ") for rank in range(3)).encode(),
]


def mutate(data: bytes, random: Random) -> bytes:
    """Change bytes, or shuffle the lines of two texts."""
    if random.random() < 0.3:
        lines = [*data.splitlines(), *random.choice(SEEDS).splitlines()]
        random.shuffle(lines)
        return b"\n".join(lines[:400])
    return mutate_bytes(data, random)


def check(data: bytes) -> bool:
    """Nothing raises; whether there is a stack."""
    found = stacks_of(data.decode("utf-8", "replace"), "x")
    stacks = [RankStack(rank or 0, stack.frames, still=True) for rank, stack in found if (rank or 0) < 64]
    for finding in judge(stacks)[0]:
        finding.to_json()
    return bool(found)
