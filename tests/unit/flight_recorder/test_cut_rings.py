"""Rings that begin anywhere, inside a coalesced call or a batch too: they know less, and say nothing false."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtobs.findings import Confidence
from dtobs.flight_recorder import analyse_dumps, dumps_from_objects
from tests.unit.flight_recorder.builders import call, dump

WORLD = 4
STEPS = 3
GROUPS = {"0": list(range(WORLD)), "1": list(range(WORLD))}
Entries = list[dict[str, Any]]


def coalesced(rank: int, step: int, state: str) -> Entries:
    """A coalescing manager around three calls, recorded one by one, and a call of its own."""
    seq = 2 * step + 1
    parts = [call(seq, "nccl:_all_gather_base", sizes=[[n]], outputs=[[WORLD * n]]) for n in (4, 5, 6)]
    return [*(part | {"state": "scheduled", "retired": False} for part in parts), _closing(seq, state)]


def batch(rank: int, step: int, state: str) -> Entries:
    """A ring exchange. Its closing entry is not flagged, and has the number of the collective before it."""
    seq = step
    after, before = (rank + 1) % WORLD, (rank - 1) % WORLD
    halves = [f"nccl:send {rank}->{after}", f"nccl:recv {rank}<-{before}"]
    return [*(call(seq, half, state="scheduled", p2p=True) for half in halves), _closing(seq, state)]


def flagged_batch(rank: int, step: int, state: str) -> Entries:
    """The same by a PyTorch that flags the closing entry."""
    return [*batch(rank, step, state)[:-1], _closing(step, state) | {"is_p2p": True}]


def batch_with_number(rank: int, step: int, state: str) -> Entries:
    """The same by an older PyTorch, where a batch has a collective number of its own."""
    return [entry | {"collective_seq_id": 2 * step + 1} for entry in batch(rank, step, state)]


def _closing(seq: int, state: str) -> dict[str, Any]:
    return call(seq, "nccl:coalesced", sizes=[], state=state)


NUMBERED = [coalesced, batch_with_number]  # the call uses up a collective number
FORMATS = [*NUMBERED, batch, flagged_batch]
Opening = Callable[[int, int, str], Entries]


def job(opening: Opening, left_out: int | None = None) -> list[dict[str, Any]]:
    """Every rank's dump of STEPS steps of three calls; of the last one, rank 1 never issues call `left_out`."""
    return [_rank(opening, rank, left_out) for rank in range(WORLD)]


def _rank(opening: Opening, rank: int, left_out: int | None) -> dict[str, Any]:
    entries: Entries = []
    for step in range(STEPS):
        for position in range(3):
            hangs = (step, position) == (STEPS - 1, left_out)
            if hangs and rank == 1:
                return dump(entries, GROUPS)
            entries += _call(opening, rank, step, position, "scheduled" if hangs else "completed")
            if hangs:
                return dump(entries, GROUPS)
    return dump(entries, GROUPS)


def _call(opening: Opening, rank: int, step: int, position: int, state: str) -> Entries:
    if position == 0:
        return opening(rank, step, state)
    if position == 1:
        return [call(2 * step + 2 if opening in NUMBERED else step + 1, sizes=[[7]], state=state)]
    return [call(step + 1, group="1", description="other", sizes=[[9]], state=state)]


def cut(dumps: list[dict[str, Any]], lost: dict[int, int]) -> dict[int, dict[str, Any]]:
    return {r: d | {"entries": d["entries"][lost.get(r, 0) :]} for r, d in enumerate(dumps)}


def check(dumps: dict[int, dict[str, Any]], left_out: int | None) -> bool:
    """Nothing false is said of `dumps`; returns whether rank 1 was found."""
    findings = analyse_dumps(dumps_from_objects(dumps)).findings
    sure = [(f.code, f.ranks) for f in findings if f.confidence is not Confidence.POSSIBLE]
    assert sure in ([], [("rank-not-joined", (1,))])
    assert all(f.code in ("rank-not-joined", "network-stalled") for f in findings)
    if left_out is None:
        assert findings == ()
    return bool(sure)


def longest_cuts(dumps: list[dict[str, Any]]) -> list[int]:
    """How much of each ring may be lost: a rank always holds the last call that it issued."""
    kept = [4 if d["entries"][-1]["profiling_name"].endswith("coalesced") else 1 for d in dumps]
    return [len(d["entries"]) - k for d, k in zip(dumps, kept, strict=True)]


every_format = pytest.mark.parametrize("opening", FORMATS, ids=lambda f: f.__name__)
every_hang = pytest.mark.parametrize("left_out", [None, 0, 1, 2], ids=lambda n: f"hangs-{n}")


@every_format
@every_hang
def test_one_ring_that_begins_anywhere(opening: Opening, left_out: int | None):
    dumps = job(opening, left_out)
    for rank, most in enumerate(longest_cuts(dumps)):
        found = [check(cut(dumps, {rank: lost}), left_out) for lost in range(most + 1)]
        if opening is not batch_with_number:  # whose numbers are not compared once the beginning is gone
            assert all(found) or left_out is None


@every_format
@every_hang
def test_all_rings_that_begin_anywhere(opening: Opening, left_out: int | None):
    dumps = job(opening, left_out)
    for lost in range(min(longest_cuts(dumps)) + 1):
        check(cut(dumps, dict.fromkeys(range(WORLD), lost)), left_out)


@every_format
@every_hang
@settings(deadline=None, max_examples=15)
@given(st.data())
def test_rings_that_begin_anywhere(opening: Opening, left_out: int | None, data: st.DataObject):
    dumps = job(opening, left_out)
    lost = {r: data.draw(st.integers(0, most)) for r, most in enumerate(longest_cuts(dumps))}
    check(cut(dumps, lost), left_out)


def test_a_ring_of_nothing_but_the_end_of_a_coalesced_call_has_issued_it():
    """Rank 1 hangs elsewhere, and its peers' calls of the group have been pushed out, but for one closing entry."""
    dumps = job(coalesced, 0)
    rings = cut(dumps, {0: len(dumps[0]["entries"]) - 2, 2: len(dumps[2]["entries"]) - 2})
    assert check(rings, 0)
    alone = cut(dumps, {0: len(dumps[0]["entries"]) - 1})
    assert check(alone, 0)
