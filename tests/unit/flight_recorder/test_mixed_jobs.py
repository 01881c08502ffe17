"""Jobs whose dumps do not all tell the same: recorders of several versions, groups that no dump lists, short rings."""

from __future__ import annotations

from typing import Any

import pytest

from dtobs.flight_recorder import analyse_dumps, dumps_from_objects
from tests.unit.flight_recorder.builders import BASE_NS, call, dump

Dumps = dict[int, dict[str, Any]]
LATE_NS = 700 * 10**9


def first(dumps: Dumps) -> tuple[str, tuple[int, ...]] | None:
    """The first finding's code and ranks, of a job that stood still for long."""
    found = analyse_dumps(dumps_from_objects(dumps, dict.fromkeys(dumps, BASE_NS + LATE_NS))).findings
    return (found[0].code, found[0].ranks) if found else None


def without(found: dict[str, Any], *fields: str) -> dict[str, Any]:
    """A dump whose entries lack some fields, as older recorders leave them out."""
    entries = [{name: value for name, value in entry.items() if name not in fields} for entry in found["entries"]]
    return {**found, "version": "2.2", "entries": entries}


def message(way: str, mine: int, other: int, order: int, state: str = "completed") -> dict[str, Any]:
    """A send or a receive of a pipeline whose group the dump does not list."""
    arrow = "->" if way == "send" else "<-"
    text = f"nccl:{way} {mine}{arrow}{other}"
    more = {"p2p_seq_id": order, "time_created_ns": BASE_NS + order * 10**6}
    return {**call(0, text, group="7", description="mesh_pp", state=state, p2p=True), **more}


def unlisted(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """A dump without a table of groups, as torch 2.3 writes it."""
    found = dump(entries)
    del found["pg_config"], found["pg_status"]
    return {**found, "version": "2.1"}


class TestRecordersOfSeveralVersions:
    """Those of torch 2.4 do not write element types: nothing is known of them, and they differ from none."""

    @staticmethod
    def job(behind: int | None = None, dtype: str | None = None) -> Dumps:
        """Four ranks, of which rank 2 has the newer recorder."""
        dumps = {}
        for rank in range(4):
            last = 9 if rank == behind else 10
            state = "completed" if behind is None else "started"
            entries = [call(seq, state=state if seq == 10 else "completed", site="train") for seq in range(1, last + 1)]
            if rank == 1 and dtype:
                entries[-1] = call(last, dtype=dtype, sizes=[[8]], state="started", site="train")
            found = dump(entries, {"0": [0, 1, 2, 3]})
            dumps[rank] = found if rank == 2 else without(found, "input_dtypes", "output_dtypes")
        return dumps

    def test_a_healthy_job_has_no_finding(self):
        assert first(self.job()) is None

    @pytest.mark.parametrize("rank", range(4))
    def test_a_rank_that_has_not_joined_is_found(self, rank: int):
        assert first(self.job(behind=rank)) == ("rank-not-joined", (rank,))

    def test_another_shape_is_found(self):
        assert first(self.job(dtype="Half")) == ("shape-mismatch", (1,))

    def test_element_types_are_compared_where_all_dumps_tell_them(self):
        dumps = {
            rank: dump([call(1, dtype="Half" if rank == 1 else "Float", state="started")], {"0": [0, 1, 2, 3]})
            for rank in range(4)
        }
        assert first(dumps) == ("dtype-mismatch", (1,))


class TestPipelinesThatNoDumpLists:
    """The numbers in a send are those of the group: without its list, a rank's own sends tell its own number."""

    @staticmethod
    def job(dead: int | None, stages: int = 4) -> Dumps:
        """Each stage has received and sent once; then all wait backwards for the last one, which sends nothing."""
        dumps = {}
        for rank in set(range(stages)) - {dead}:
            entries = [message("recv", rank, rank - 1, 1)] if rank else []
            if rank < stages - 1:
                entries.append(message("send", rank, rank + 1, 2))
                entries.append(message("recv", rank, rank + 1, 3, "scheduled"))
            dumps[rank] = unlisted(entries)
        return dumps

    @pytest.mark.parametrize("dead", range(4))
    def test_no_stage_is_accused_for_one_that_left_no_dump(self, dead: int):
        last = ("rank-not-joined", (3,))
        assert first(self.job(dead)) in (("dumps-missing", ()), last if dead != 3 else None)

    def test_the_last_stage_is_found_where_all_dumps_are_there(self):
        assert first(self.job(None)) == ("rank-not-joined", (3,))

    def test_the_ranks_of_a_message_are_told_rightly(self):
        analysis = analyse_dumps(dumps_from_objects(self.job(1)))
        waits = {row.rank: row.waits_in for row in analysis.ranks}
        assert waits[2] == "recv [4] Float (rank 3 to rank 2) of group 7 (mesh_pp)"
        assert waits[0] == "recv [4] Float of group 7 (mesh_pp)"


@pytest.mark.parametrize("kept", [2, 3])
def test_a_ring_that_lost_calls_nobody_completed_accuses_nobody(kept: int):
    """Hosts ran ahead of their devices by more than their rings hold, and one of them by a call less."""
    dumps = {}
    for rank in range(4):
        last = 9 if rank == 2 else 10
        entries = [call(seq, state="scheduled") for seq in range(1, last + 1)]
        numbered = [{"record_id": number, **entry} for number, entry in enumerate(entries)][-kept:]
        dumps[rank] = {**dump([], {"0": [0, 1, 2, 3]}), "entries": numbered}
    found = analyse_dumps(dumps_from_objects(dumps, dict.fromkeys(dumps, BASE_NS + LATE_NS))).findings
    assert not [f for f in found if f.code == "device-stopped"]


def test_a_device_that_lags_is_found_where_a_wrapped_ring_shows_what_its_peers_completed():
    dumps = {}
    for rank in range(4):
        done = 8 if rank == 2 else 9
        entries = [call(seq, state="completed" if seq <= done else "scheduled") for seq in range(1, 11)]
        numbered = [{"record_id": number, **entry} for number, entry in enumerate(entries)][-4:]
        dumps[rank] = {**dump([], {"0": [0, 1, 2, 3]}), "entries": numbered}
    assert first(dumps) == ("device-stopped", (2,))
