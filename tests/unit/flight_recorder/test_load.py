"""Folders of dumps: names, formats, several files of a rank, several children."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pickle
import resource
from pathlib import Path

import numpy as np
import pytest

from dtobs.errors import DumpError, TargetError
from dtobs.flight_recorder import analyse_dumps, dumps_from_objects, load_dumps, reader
from dtobs.flight_recorder.names import find_dumps, rank_of
from dtobs.testing.layout import JobLayout
from dtobs.testing.simulate import SimulatedFault
from dtobs.testing.synthetic_dumps import SimulatedJob, dumps_of, write_dumps
from tests.unit.flight_recorder.builders import BASE_NS, call, dump, gloo

JOB = SimulatedJob(JobLayout(dp=3, tp=1, pp=1), SimulatedFault("rank-not-joined", 1, "dp"), entries=30, steps=8)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("nccl_trace_rank_3", 3),
        ("dump_12.pickle", 12),
        ("rank3.json", 3),
        ("rank-00003.fr.json", 3),
        ("comm_lib_trace_rank_17.pkl.gz", 17),
        ("0", 0),
        ("host7_rank_4", 4),
        ("node1.rank-3.json", 3),
        ("10.0.0.7.rank4.pkl", 4),
        ("rank-00003.stacks.txt", None),
        ("notes.txt", None),
        ("run.json", None),
        ("report_2026.html", None),
        ("x_99999999", None),
        ("core.1700000123", None),
        ("rank_0.host1", None),
        ("rank_1_of_2", None),
        ("dump-000000000012", None),
    ],
)
def test_rank_of(name: str, rank: int | None):
    assert rank_of(name) == rank


def _pickle(dump):
    return pickle.dumps(dump, protocol=2)


def _json(dump):
    return json.dumps(dump).encode()


@pytest.mark.parametrize(
    "encode", [_pickle, _json, lambda d: gzip.compress(_pickle(d)), lambda d: gzip.compress(_json(d))]
)
def test_formats_give_one_verdict(tmp_path: Path, encode):
    for rank, one in dumps_of(JOB):
        (tmp_path / f"dump_{rank}").write_bytes(encode(one))
    dumps = load_dumps(tmp_path)
    found = analyse_dumps(dumps).findings
    assert [(f.code, f.ranks) for f in found] == [JOB.expected]
    taken_ns = {dump.rank: dump.taken_ns or 0 for dump in dumps.ranks}
    assert found == analyse_dumps(dumps_from_objects(dict(dumps_of(JOB)), taken_ns)).findings


def test_several_files_of_a_rank(tmp_path: Path):
    write_dumps(JOB, tmp_path)
    (tmp_path / "rank1.json").write_text("{}")
    (tmp_path / "older_2").write_bytes(b"")
    os.utime(tmp_path / "older_2", (0, 0))
    found = find_dumps(tmp_path)
    assert [files[0].path.name for files in found.values()] == [f"nccl_trace_rank_{r}" for r in range(3)]
    assert load_dumps(tmp_path).notes == (
        "rank 1 has several files: nccl_trace_rank_1 is used, not rank1.json",
        "rank 2 has several files: nccl_trace_rank_2 is used, not older_2",
    )


def test_names_with_the_hosts_in_them_are_one_series(tmp_path: Path):
    for name in ("node-a_rank_0", "node-b_rank_1", "gpu07_rank_2", "log.2"):
        (tmp_path / name).touch()
    assert [files[0].path.name for files in find_dumps(tmp_path).values()] == [
        "node-a_rank_0",
        "node-b_rank_1",
        "gpu07_rank_2",
    ]


JUNK = ("torchrun.log.2", "session-64", "core.1700000123", "run_1999999", "events.out.tfevents.17.host.4242")


def test_files_that_only_end_in_a_number_change_nothing(tmp_path: Path):
    write_dumps(JOB, tmp_path)
    alone = load_dumps(tmp_path)
    for name in JUNK:
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "data_7.json").write_text('{"lr": 1}')
    dumps = load_dumps(tmp_path)
    assert (dumps.world_size, dumps.missing_ranks, dumps.problems) == (3, (), ())
    assert analyse_dumps(dumps).findings == analyse_dumps(alone).findings
    assert dumps.notes == (
        "not taken for dumps (unreadable, and named unlike those read): data_7.json,"
        " events.out.tfevents.17.host.4242, run_1999999, session-64",
        "rank 2 has several files: nccl_trace_rank_2 is used, not torchrun.log.2",
    )


def test_a_rank_is_read_from_the_first_of_its_files_that_can_be(tmp_path: Path):
    """More ranks have a log than a dump, and the logs are newer."""
    write_dumps(JOB, tmp_path)
    for rank in range(5):
        (tmp_path / f"worker.log.{rank}").write_bytes(b"x")
    dumps = load_dumps(tmp_path)
    assert [Path(dump.source).name for dump in dumps.ranks] == [f"nccl_trace_rank_{r}" for r in range(3)]
    assert dumps.world_size == 3


def test_a_torn_file_named_like_the_dumps_is_a_rank(tmp_path: Path):
    write_dumps(JOB, tmp_path)
    (tmp_path / "nccl_trace_rank_3").write_bytes(b"\x80\x02")
    dumps = load_dumps(tmp_path)
    assert [problem.rank for problem in dumps.problems] == [3]
    assert (dumps.world_size, dumps.missing_ranks) == (4, (3,))


def test_several_children_give_the_same_dumps(tmp_path: Path):
    job = SimulatedJob(JobLayout(dp=5, tp=4, pp=1), SimulatedFault("rank-not-joined", 7, "dp"), entries=30, steps=8)
    write_dumps(job, tmp_path)
    one, three = load_dumps(tmp_path, children=1), load_dumps(tmp_path, children=3)
    assert np.array_equal(one.entries, three.entries)
    assert (one.operations, one.sites) == (three.operations, three.sites)
    assert [g.label for g in one.groups] == [g.label for g in three.groups]


def test_folders_that_are_none(tmp_path: Path):
    with pytest.raises(TargetError, match="holds no Flight Recorder dump: dumps lie in one folder, and the name"):
        load_dumps(tmp_path)
    with pytest.raises(TargetError, match="cannot be listed"):
        load_dumps(tmp_path / "absent")


def test_json_that_is_something_else(tmp_path: Path):
    (tmp_path / "config_1.json").write_text('{"lr": 1}')
    with pytest.raises(TargetError, match="it holds no list of entries: not a Flight Recorder dump"):
        load_dumps(tmp_path)


def test_objects_that_are_no_dump():
    with pytest.raises(DumpError, match="the dump of rank 4: it holds no list of entries"):
        dumps_from_objects({4: []})


def test_world_and_missing_ranks(tmp_path: Path):
    write_dumps(JOB, tmp_path)
    (tmp_path / "nccl_trace_rank_0").unlink()
    dumps = load_dumps(tmp_path)
    assert (dumps.world_size, dumps.missing_ranks) == (3, (0,))


def test_a_process_with_many_open_files_reads_dumps_too(tmp_path: Path):
    write_dumps(JOB, tmp_path)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit[1] < 1300:
        pytest.skip(f"only {limit[1]} files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit[0], 1300), limit[1]))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limit)
        for _ in range(1100):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        assert [dump.rank for dump in load_dumps(tmp_path).ranks] == [0, 1, 2]


def test_a_reader_that_fails_raises_where_its_results_are_read(tmp_path: Path, monkeypatch):
    write_dumps(JOB, tmp_path)
    monkeypatch.setattr(reader.DumpReader, "read", lambda self, path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load_dumps(tmp_path)


def test_the_recorders_of_one_process_are_one(tmp_path: Path):
    for rank in range(4):
        steps = dump([call(n, at_ns=BASE_NS + 3 * n) for n in range(1, 9)], {"0": [0, 1, 2, 3]})
        saves = dump([gloo(n, at_ns=BASE_NS + 7 * n, done=n < 3) for n in range(1, 3 + (rank != 2))])
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(steps))
        (tmp_path / f"gloo_trace_rank_{rank}").write_bytes(pickle.dumps(saves))
    (tmp_path / "gloo_trace_rank_3").write_bytes(b"")
    dumps = load_dumps(tmp_path)
    found = analyse_dumps(dumps).findings
    assert [(f.code, f.ranks, f.group) for f in found] == [
        ("rank-not-joined", (2,), "0 (default_pg, on the host)"),
        ("dumps-missing", (), "0 (default_pg, on the host)"),  # of rank 3 only one recorder's
    ]
    assert (dumps.entries["record"][dumps.row == 0] == range(11)).all()
    os.utime(tmp_path / "gloo_trace_rank_2", (0, 0))
    assert "rank 2 has several files: nccl_trace_rank_2 is used, not gloo_trace_rank_2" in load_dumps(tmp_path).notes


@pytest.mark.parametrize("older", ["nccl", "gloo"])
def test_a_recorder_without_a_call_is_not_a_missing_one(tmp_path: Path, older: str):
    for rank in range(2):
        steps = dump([call(n, at_ns=BASE_NS + n) for n in (1, 2)], {"0": [0, 1]})
        saves = dump([gloo(1, at_ns=BASE_NS + 9, done=False)] * (rank == 0))
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(steps))
        (tmp_path / f"gloo_trace_rank_{rank}").write_bytes(pickle.dumps(saves))
        os.utime(tmp_path / f"{older}_trace_rank_{rank}", (BASE_NS / 1e9 + 60, BASE_NS / 1e9 + 60))
        newer = {"nccl": "gloo", "gloo": "nccl"}[older]
        os.utime(tmp_path / f"{newer}_trace_rank_{rank}", (BASE_NS / 1e9 + 61, BASE_NS / 1e9 + 61))
    found = analyse_dumps(load_dumps(tmp_path)).findings
    assert [(f.code, f.ranks) for f in found] == [("rank-not-joined", (1,))]


def test_json_of_a_recorder_without_entries(tmp_path: Path):
    for rank in range(4):
        waits = [call(1, state="started", at_ns=BASE_NS)] if rank != 1 else []
        text = json.dumps({k: v for k, v in dump(waits, {"0": [0, 1, 2, 3]}).items() if v or k != "entries"})
        (tmp_path / f"rank{rank}.json").write_text(text)
    found = analyse_dumps(load_dumps(tmp_path)).findings
    assert [(f.code, f.ranks) for f in found] == [("rank-not-joined", (1,))]
