"""Dumps as strangers have them: of the first schema, of recorders that were off, of jobs in full run."""

from __future__ import annotations

from typing import Any

import pytest

from dtobs.errors import DumpError
from dtobs.findings import Confidence
from dtobs.flight_recorder import DumpAnalysis, analyse_dumps, dumps_from_objects
from tests.unit.flight_recorder.builders import BASE_NS, call, dump

CALL_NS = 50 * 10**6
LATE_NS = 700 * 10**9


def at(rank: int, seq: int) -> int:
    """When a rank issued a call: fifty milliseconds lie between two."""
    return BASE_NS + seq * CALL_NS + rank * 10**6


def calls(rank: int, issued: int, done: int, name: str = "nccl:all_reduce", first: int = 1) -> list[dict[str, Any]]:
    """All-reduces up to one, completed up to another."""
    return [
        call(seq, name, state="completed" if seq <= done else "started", at_ns=at(rank, seq), site="train")
        for seq in range(first, issued + 1)
    ]


def job(issued: list[int], done: list[int], **more: Any) -> dict[int, dict[str, Any]]:
    """One dump a rank."""
    world = {"0": list(range(len(issued)))}
    return {rank: dump(calls(rank, issued[rank], done[rank], **more), world) for rank in range(len(issued))}


def judged(dumps: dict[int, Any], seconds: float | None = 700.0, seq: int = 100) -> DumpAnalysis:
    """What is said of dumps that were written so long after a call; None: a copy without times."""
    taken = None if seconds is None else dict.fromkeys(dumps, at(0, seq) + int(seconds * 1e9))
    return analyse_dumps(dumps_from_objects(dumps, taken))


def verdict(analysis: DumpAnalysis) -> tuple[str, tuple[int, ...]] | None:
    """The first finding's code and ranks."""
    return (analysis.findings[0].code, analysis.findings[0].ranks) if analysis.findings else None


class TestFirstSchema:
    """Of torch 2.3: one number for all calls, groups without names."""

    @staticmethod
    def of_rank(issued: int, done: int, **more: Any) -> dict[str, Any]:
        entries = []
        for number, entry in enumerate(calls(0, issued, done)):
            for newer in (
                "collective_seq_id",
                "p2p_seq_id",
                "process_group",
                "is_p2p",
                "input_dtypes",
                "output_dtypes",
            ):
                del entry[newer]
            entries.append({**entry, "record_id": number, "seq_id": number + 1, "pg_id": 0, **more})
        return {"version": "1.4", "entries": entries}

    def test_a_rank_that_has_not_joined(self):
        analysis = judged({rank: self.of_rank(50 if rank != 2 else 49, 49) for rank in range(4)})
        assert verdict(analysis) == ("rank-not-joined", (2,))

    def test_a_job_that_is_done(self):
        assert verdict(judged({rank: self.of_rank(50, 50) for rank in range(4)})) is None

    @pytest.mark.parametrize(
        ("more", "message"),
        [({"pg_id": 1}, "does not name the ranks of a group"), ({"profiling_name": "nccl:send 0->1"}, "has both")],
    )
    def test_what_it_does_not_tell(self, more: dict[str, Any], message: str):
        with pytest.raises(DumpError, match=message):
            dumps_from_objects({0: self.of_rank(5, 5, **more)})


def test_a_job_in_full_run_whose_ranks_are_some_calls_apart():
    dumps = job([100 + rank % 4 for rank in range(8)], [99 + rank % 3 for rank in range(8)])
    for seconds in (0.3, None):
        analysis = judged(dumps, seconds, seq=103)
        assert analysis.findings == ()
        assert "a job in motion" in analysis.notes[0]


def test_a_recorder_that_holds_nothing_does_not_prove_that_nothing_was_called():
    dumps = job([50] * 4, [49] * 4)
    dumps[2]["entries"] = []
    analysis = judged(dumps)
    assert verdict(analysis) == ("dumps-missing", ())
    assert "rank 2 do not hold what their peers have completed" in analysis.findings[0].summary


def test_a_rank_that_counts_from_the_beginning_again():
    analysis = judged(job([50, 50, 50, 3], [49, 49, 49, 3]))
    assert verdict(analysis) == ("dumps-missing", ())
    assert "rank 3 do not hold" in analysis.findings[0].summary


def test_a_network_that_stalls_in_many_groups_is_one_finding():
    dumps = {}
    for rank in range(256):
        name, members = f"tp{rank // 8}", [rank // 8 * 8 + n for n in range(8)]
        states = {**dict.fromkeys(range(1, 9), "completed"), 9: "started"}
        entries = [call(s, group=name, state=state, at_ns=at(rank, s)) for s, state in states.items()]
        dumps[rank] = dump(entries if rank != 77 else entries[:-1], {name: members})
    found = judged(dumps).findings
    assert [(f.code, f.ranks) for f in found] == [("rank-not-joined", (77,)), ("network-stalled", ())]
    assert "the same in 27 further groups" in found[1].summary


@pytest.mark.parametrize("backend", ["nccl2", "xccl", "hccl", "ucc"])
def test_backends_that_came_later(backend: str):
    assert verdict(judged(job([50, 49, 50, 50], [49] * 4, name=f"{backend}:all_reduce"))) == ("rank-not-joined", (1,))


def test_rings_that_begin_at_different_points():
    world = {"0": list(range(4))}
    firsts = (4000, 4500, 3001, 4990)
    dumps = {
        rank: dump(calls(rank, 4999 if rank == 1 else 5000, 4999, first=first), world)
        for rank, first in enumerate(firsts)
    }
    assert verdict(judged(dumps, seq=5000)) == ("rank-not-joined", (1,))


def test_the_root_of_a_broadcast_went_on_without_a_rank_that_never_came():
    dumps = job([40] * 4, [40] * 4)
    for rank in range(3):
        state = "started" if rank else "completed"
        dumps[rank]["entries"].append({"record_id": 41, **call(41, "nccl:broadcast", state=state, at_ns=at(rank, 41))})
    dumps[0]["entries"].append({"record_id": 42, **call(42, state="started", at_ns=at(0, 42))})
    analysis = judged(dumps)
    assert verdict(analysis) == ("rank-not-joined", (3,))
    assert analysis.findings[0].confidence is not Confidence.CERTAIN


def test_one_dump_of_four():
    dumps = {0: dump(calls(0, 50, 49), {"0": [0, 1, 2, 3]})}
    analysis = judged(dumps)
    assert verdict(analysis) == ("dumps-missing", ())
    assert "the dumps of ranks 1-3 are missing" in analysis.findings[0].summary
