"""Dumps of many kinds with a fault planted by hand: pipelines, meshes, coalesced calls, old schemas, copied files."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtobs.flight_recorder import DumpAnalysis, analyse_dumps, dumps_from_objects
from dtobs.flight_recorder.load import load_dumps
from tests.unit.flight_recorder.builders import BASE_NS, call, dump, gloo

Dumps = dict[int, dict[str, Any]]
EIGHT = list(range(8))
LATE_NS = 700 * 10**9


def state(seq: int, done: int) -> str:
    """How a call stands on a device that completed so many."""
    return "completed" if seq <= done else "started" if seq == done + 1 else "scheduled"


def train(issued: int, done: int, **more: Any) -> list[dict[str, Any]]:
    """All-reduces of a training loop."""
    return [call(seq, state=state(seq, done), site="train", **more) for seq in range(1, issued + 1)]


def p2p(seq: int, way: str, one: int, other: int, how: str = "completed", group: str = "pp") -> dict[str, Any]:
    """A message of a pipeline, between two ranks of its group."""
    return {
        **call(
            0,
            f"nccl:{way} {one}{'->' if way == 'send' else '<-'}{other}",
            group=group,
            description="pp",
            state=how,
            p2p=True,
        ),
        "p2p_seq_id": seq,
        "time_created_ns": BASE_NS + seq * 10**6 + 1,
    }


def pipeline_that_waits_for_a_stage() -> Dumps:
    """Two stages of two ranks: stage 1 waits for activations; rank 0 is late in the all-reduce of its replica."""
    groups = {"dp0": [0, 1], "dp1": [2, 3], "ppa": [0, 2], "ppb": [1, 3]}
    dumps = {}
    for rank in range(4):
        stage, replica = divmod(rank, 2)
        name = f"pp{'ab'[replica]}"
        way, ends = ("send", (0, 1)) if stage == 0 else ("recv", (1, 0))
        entries = [p2p(n, way, *ends, group=name) for n in range(1, 9)]
        if stage == 0:
            entries += [call(n, group=f"dp{stage}", state="completed") for n in range(1, 5)]
            if rank == 1:
                entries.append(call(5, group="dp0", state="started", at_ns=BASE_NS + 20 * 10**6))
        else:
            entries.append(p2p(9, "recv", 1, 0, "started", group=name))
        dumps[rank] = dump(entries, groups)
    return dumps


def mesh_in_two_orders() -> Dumps:
    """A mesh of 2 x 2: all reduced over rows first until now, and ranks 1 and 2 take columns first."""
    groups = {"r0": [0, 1], "r1": [2, 3], "c0": [0, 2], "c1": [1, 3]}
    dumps = {}
    for rank in range(4):
        row, column = f"r{rank // 2}", f"c{rank % 2}"
        first = row if rank in (0, 3) else column
        entries = [call(n, group=name) for n in range(1, 4) for name in (row, column)]
        entries.append(call(4, group=first, state="started", at_ns=BASE_NS + 9 * 10**6))
        dumps[rank] = dump(entries, groups)
    return dumps


def coalesced_gathers() -> Dumps:
    """FSDP2 gathers several tensors in one call, under one number; rank 5 never comes to the last."""
    dumps = {}
    for rank in EIGHT:
        entries = []
        for seq in range(1, 7):
            if rank == 5 and seq == 6:
                break
            how = "completed" if seq < 6 else "started"
            entries += [
                call(seq, "nccl:_all_gather_base_coalesced", sizes=[[n]], outputs=[[8 * n]], state=how)
                for n in (4, 6, 2)
            ]
            entries.append(call(seq, "nccl:all_gather_into_tensor_coalesced", sizes=[[12]], outputs=[[96]], state=how))
        dumps[rank] = dump(entries, {"0": EIGHT})
    return dumps


def retired_entries() -> Dumps:
    """Works are retired by the watchdog before anybody looks at their events: states stay scheduled."""
    dumps = {}
    for rank in range(4):
        issued = 29 if rank == 3 else 30
        entries = [call(seq, state="scheduled", retired=seq < 30) for seq in range(1, issued + 1)]
        dumps[rank] = dump(entries, {"0": list(range(4))})
    return dumps


def half_of_the_job() -> Dumps:
    """Only the first node's files were copied: all of them wait."""
    return {rank: dump(train(50, 49), {"0": EIGHT}) for rank in range(4)}


def half_of_the_job_with_the_culprit() -> Dumps:
    """Only the first node's files were copied: rank 1 is behind its neighbours."""
    return {rank: dump(train(49 if rank == 1 else 50, 49), {"0": EIGHT}) for rank in range(4)}


def another_collective() -> Dumps:
    """Rank 6 scatters where the others gather."""
    dumps = {rank: dump(train(20, 20), {"0": EIGHT}) for rank in EIGHT}
    for rank, entries in ((rank, found["entries"]) for rank, found in dumps.items()):
        gather = call(21, "nccl:_all_gather_base", sizes=[[4]], outputs=[[32]], state="started")
        scatter = call(21, "nccl:_reduce_scatter_base", sizes=[[32]], outputs=[[4]], state="started")
        entries.append({"record_id": 20, **(scatter if rank == 6 else gather)})
    return dumps


def a_bucket_more() -> Dumps:
    """Rank 2 froze a layer: its last gradient bucket is smaller."""
    dumps = {rank: dump(train(12, 12), {"0": EIGHT}) for rank in EIGHT}
    for rank, found in dumps.items():
        found["entries"].append({"record_id": 12, **call(13, sizes=[[100 if rank == 2 else 160]], state="started")})
    return dumps


def experts_of_uneven_load() -> Dumps:
    """Healthy: all-to-alls of experts have another size on every rank, and all are done."""
    return {
        rank: dump(
            [
                call(seq, "nccl:all_to_all", sizes=[[rank * 7 + seq]], outputs=[[rank * 5 + 2 * seq]], site="moe")
                for seq in range(1, 40)
            ],
            {"0": EIGHT},
        )
        for rank in EIGHT
    }


def first_stage_ahead() -> Dumps:
    """Healthy: stage 0 has sent more micro-batches than stage 1 has taken, at the dump of a job in motion."""
    groups = {"pp": [0, 1]}
    sends = [p2p(n, "send", 0, 1, "completed" if n < 7 else "scheduled") for n in range(1, 9)]
    takes = [p2p(n, "recv", 1, 0, "completed" if n < 7 else "started") for n in range(1, 8)]
    return {0: dump(sends, groups), 1: dump(takes, groups)}


def lists_of_uneven_tensors() -> Dumps:
    """Healthy: each rank gathers and scatters a tensor of a size of its own, which its peers' lists hold as well."""
    every = [[10 + rank] for rank in EIGHT]
    dumps = {}
    for rank in EIGHT:
        own = [every[rank]]
        pairs = [("all_gather", own, every), ("reduce_scatter", every, own)] * 9
        calls = [call(n, f"nccl:{name}", sizes=i, outputs=o) for n, (name, i, o) in enumerate(pairs, 1)]
        dumps[rank] = dump(calls, {"0": EIGHT})
    return dumps


def recorders_begun_anew() -> Dumps:
    """Both recorders of a pipeline were reset, stage 1's later; stage 0 does not send what stage 1 waits for."""
    groups = {"pp": [0, 1]}
    sends = [p2p(n, "send", 0, 1) for n in range(3, 21)]
    takes = [p2p(n, "recv", 1, 0, "completed" if n < 21 else "started") for n in range(5, 22)]
    return {0: dump(sends, groups), 1: dump(takes, groups)}


def checkpoints_over_gloo() -> Dumps:
    """Gloo and NCCL in one recorder: rank 3's device has not done what its peers' have."""
    dumps = {}
    for rank in EIGHT:
        entries = [gloo(n, "all_gather", group="g", sizes=[[1]], outputs=[[8]]) for n in range(1, 6)]
        entries += [call(n, state="completed" if n < 20 + (rank != 3) else "scheduled") for n in range(1, 22)]
        dumps[rank] = dump(entries, {"0": EIGHT, "g": EIGHT})
    return dumps


def dump_of_an_older_attempt() -> Dumps:
    """Rank 5 is missing in a call. Of rank 7 a dump of an earlier run was left, which was in motion."""
    return {
        rank: dump(train(25, 24) if rank == 7 else train(60 if rank == 5 else 61, 60), {"0": EIGHT}) for rank in EIGHT
    }


def recorded_by_a_hook() -> Dumps:
    """As torch 2.14 records a backend that has no recorder: entries are retired as soon as the call is issued."""
    entries = [call(n, "c10d:allreduce", state="scheduled", retired=True, outputs=[]) for n in range(1, 31)]
    return {rank: dump(entries[: 29 if rank == 3 else 30], {"0": list(range(4))}) for rank in range(4)}


def recorded_twice() -> Dumps:
    """That hook beside the backend's own recorder; rank 3 is missing in the last call."""
    dumps = {}
    for rank in range(4):
        pairs = [
            (call(n, "c10d:allreduce", state="scheduled", retired=True, outputs=[]), gloo(n, done=n < 30))
            for n in range(1, 30 if rank == 3 else 31)
        ]
        dumps[rank] = dump([entry for pair in pairs for entry in pair], {"0": list(range(4))})
    return dumps


def one_group_over_two_backends() -> Dumps:
    """cpu:gloo,cuda:nccl: both count from 1 under the name of one group. Rank 2 is missing in a call of Gloo."""
    dumps = {}
    for rank in EIGHT:
        entries = [call(n) for n in range(1, 40)]
        entries += [gloo(n, "all_gather", sizes=[[1]], outputs=[[8]], done=n < 5) for n in range(1, 5 + (rank != 2))]
        dumps[rank] = dump(entries, {"0": EIGHT})
    return dumps


Answer = tuple[str, tuple[int, ...]] | None
PLANTED: list[tuple[Callable[[], Dumps], Answer]] = [
    (pipeline_that_waits_for_a_stage, ("rank-not-joined", (0,))),
    (mesh_in_two_orders, ("group-deadlock", (1, 2))),
    (coalesced_gathers, ("rank-not-joined", (5,))),
    (retired_entries, ("rank-not-joined", (3,))),
    (half_of_the_job, ("dumps-missing", ())),
    (half_of_the_job_with_the_culprit, ("rank-not-joined", (1,))),
    (another_collective, ("collective-mismatch", (6,))),
    (a_bucket_more, ("shape-mismatch", (2,))),
    (experts_of_uneven_load, None),
    (first_stage_ahead, None),
    (lists_of_uneven_tensors, None),
    (recorders_begun_anew, ("rank-not-joined", (0,))),
    (checkpoints_over_gloo, ("device-stopped", (3,))),
    (dump_of_an_older_attempt, ("rank-not-joined", (5,))),
    (recorded_by_a_hook, ("rank-not-joined", (3,))),
    (recorded_twice, ("rank-not-joined", (3,))),
    (one_group_over_two_backends, ("rank-not-joined", (2,))),
]


def verdict(analysis: DumpAnalysis) -> Answer:
    """The first finding's code and ranks."""
    return (analysis.findings[0].code, analysis.findings[0].ranks) if analysis.findings else None


def taken(dumps: Dumps, answer: Answer) -> dict[int, int]:
    """When the dumps were written: long after the last call where the job hangs, at once where it is well."""
    after = LATE_NS if answer is not None else 50 * 10**6
    return dict.fromkeys(dumps, BASE_NS + after)


def as_torch(version: str, found: dict[str, Any]) -> dict[str, Any]:
    """The same dump in the schema of an older or newer recorder."""
    old = {**found, "version": version}
    if version == "2.2":  # torch 2.4: no dtypes, no state of groups
        keep = {"input_dtypes", "output_dtypes"}
        old["entries"] = [{k: v for k, v in entry.items() if k not in keep} for entry in found["entries"]]
        del old["pg_status"]
    elif version == "2.12":  # a recorder to come
        old["entries"] = [{**e, "thread_id": "140", "thread_name": "pt_main", "new": None} for e in found["entries"]]
        old |= {"nccl_version": "2.29.2", "host_name": "n1", "rank": 3}
    return old


@pytest.mark.parametrize("version", ["2.2", "2.4", "2.10", "2.12"])
@pytest.mark.parametrize(("plant", "answer"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
def test_planted(plant: Callable[[], Dumps], answer: Answer, version: str):
    dumps = plant()
    told = {rank: as_torch(version, found) for rank, found in dumps.items()}
    assert verdict(analyse_dumps(dumps_from_objects(told, taken(dumps, answer)))) == answer


@pytest.mark.parametrize("name", ["nccl_trace_rank_{}", "dump-job7_{}.pickle", "rank{}.json", "node1.rank-{}.json"])
@pytest.mark.parametrize(("plant", "answer"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
def test_planted_in_renamed_files(tmp_path: Path, plant: Callable[[], Dumps], answer: Answer, name: str):
    for rank, found in plant().items():
        data = json.dumps(found).encode() if name.endswith("json") else pickle.dumps(found, protocol=2)
        (tmp_path / name.format(rank)).write_bytes(data)
    if answer is not None:
        assert verdict(analyse_dumps(load_dumps(tmp_path))) == answer
