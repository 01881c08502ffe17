"""NCCL Inspector's files: who comes late and who gave another size, and quiet where nobody does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from dtobs.diagnose.folder import diagnose_folder
from dtobs.findings import Confidence, Finding

Seconds = Callable[[int, int, Random], float]


def dump(
    folder: Path,
    seconds: Seconds,
    *,
    ranks: int = 4,
    calls: int = 100,
    name: str = "0x7f8c",
    first: int = 0,
    marker: bool = False,
    size: Callable[[int, int], int] = lambda rank, call: 1 << 20,
) -> None:
    """One file a process, as the plugin writes it; `marker`: as version 5 does, the header once a dump."""
    random = Random(4)
    folder.mkdir(exist_ok=True)
    for rank in range(ranks):
        head = {
            "header": {"id": name, "rank": rank, "n_ranks": ranks, "nnodes": 1},
            "metadata": {"inspector_output_format_version": "v5.0", "hostname": "gpu-1", "pid": 900 + first + rank},
        }
        with (folder / f"gpu-1-pid{900 + first + rank}.log").open("a") as file:
            for call in range(calls):
                head["metadata"]["dump_timestamp_us"] = 1_748_030_377_000_000 + call * 100_000
                perf = {
                    "coll": "AllReduce",
                    "coll_sn": call,
                    "coll_msg_size_bytes": size(rank, call),
                    "coll_exec_time_us": int(1e6 * seconds(rank, call, random)),
                }
                if marker and call % 10 == 0:
                    file.write(json.dumps({**head, "dump_stats": {"records": 10}}) + "\n")
                file.write(json.dumps({"coll_perf": perf} if marker else {**head, "coll_perf": perf}) + "\n")


def found(folder: Path) -> list[Finding]:
    return list(diagnose_folder(folder).findings)


def late(rank: int, call: int, random: Random) -> float:
    return 0.002 + random.random() / 1e4 if rank == 2 else 0.022 + random.random() / 1e3


def even(rank: int, call: int, random: Random) -> float:
    return 0.004 + random.random() * 0.02


@pytest.mark.parametrize("marker", [False, True], ids=["version 4", "version 5"])
def test_who_comes_last_every_time(tmp_path: Path, marker: bool):
    dump(tmp_path, late, marker=marker)
    (only,) = found(tmp_path)
    assert (only.code, only.ranks, only.confidence) == ("straggler", (2,), Confidence.LIKELY)
    assert "comes last to 100 % of 100 calls" in only.summary
    assert diagnose_folder(tmp_path).world_size == 4


@pytest.mark.parametrize(
    ("seconds", "calls"),
    [
        (even, 100),
        (late, 40),  # too few to tell
        (lambda rank, call, random: 0.0200 - 0.0005 * (rank == 1), 100),  # always the shortest, and hardly shorter
        (lambda rank, call, random: 0.00002 - 0.00001 * (rank == 1), 100),  # shorter by half, of nothing
        (lambda rank, call, random: 0.020 - 0.015 * (rank == call % 4), 100),  # each in turn
    ],
    ids=["even", "few", "hardly", "nothing", "in turn"],
)
def test_nobody_is_late(tmp_path: Path, seconds: Seconds, calls: int):
    dump(tmp_path, seconds, calls=calls)
    assert found(tmp_path) == []


def test_another_size_in_one_call(tmp_path: Path):
    dump(tmp_path, even, size=lambda rank, call: 4096 + 4 * (rank == 3 and call == 57))
    (only,) = found(tmp_path)
    assert (only.code, only.ranks) == ("shape-mismatch", (3,))
    assert "AllReduce #57" in only.summary


def test_a_rank_of_a_part_is_one_of_the_job_by_its_process(tmp_path: Path):
    dump(tmp_path, even)
    dump(tmp_path, lambda rank, call, random: 0.002 if rank == 1 else 0.03, ranks=2, name="0x99", first=2)
    (only,) = found(tmp_path)
    assert (only.code, only.ranks) == ("straggler", (3,))


def test_a_rank_whose_place_nobody_tells_is_named_by_its_process(tmp_path: Path):
    dump(tmp_path, even, ranks=2, name="0xa", first=0, calls=9)
    dump(tmp_path, late, ranks=3, name="0xb", first=4)
    dump(tmp_path, even, ranks=3, name="0xc", first=5, calls=9)
    (only,) = found(tmp_path)
    assert (only.code, only.ranks) == ("straggler", ())
    assert "process 906 on gpu-1" in only.summary


@pytest.mark.parametrize("cut", [0, 1, 7])
def test_torn_and_foreign_lines_are_passed_over(tmp_path: Path, cut: int):
    dump(tmp_path, late)
    for path in tmp_path.iterdir():
        path.write_bytes(
            path.read_bytes()[: -cut or None] + b'\n{"header": [1], "coll_perf": {"coll_sn": -1}}\n\xff{\n[]\n'
        )
    assert [one.code for one in found(tmp_path)] == ["straggler"]
