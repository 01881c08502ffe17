"""Dumps that PyTorch itself wrote, on Gloo ranks, read without torch by the same code as any job's.

The ranks write their dumps as soon as they show what the test wants, and set the files' times as a watchdog's would
be: written ten minutes after the calls.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dtobs.findings import Confidence
from dtobs.flight_recorder import DumpAnalysis, analyse_dumps, load_dumps
from tests.harness import FileBarrier, run_ranks

TIMEOUT_SECONDS = 600


def _write(rank: int, folder: Path, ready: Callable[[dict], bool]) -> None:
    """Dump until `ready(dump)`: the recorder notes a call's end a moment after the call returned."""
    deadline = time.monotonic() + 30
    while True:
        data = torch._C._distributed_c10d._dump_fr_trace()
        if ready(pickle.loads(data)):
            break
        if time.monotonic() > deadline:
            raise TimeoutError("the recorder does not show what it should")
        time.sleep(0.005)
    text = torch._C._distributed_c10d._dump_fr_trace_json()
    later = time.time() + TIMEOUT_SECONDS
    for path, content in (
        (folder / "pickle" / f"trace_rank_{rank}", data),
        (folder / "json" / f"rank{rank}.json", text.encode() if isinstance(text, str) else text),
    ):
        path.write_bytes(content)
        os.utime(path, (later, later))


def _all_done(dump: dict) -> bool:
    return all(entry["retired"] for entry in dump["entries"])


def _some_steps(rank: int, world_size: int, steps: int) -> None:
    pair = dist.new_group([0, 1])
    value = torch.ones(4, 3)
    for _ in range(steps):
        dist.all_reduce(value)
        if rank < 2:
            dist.broadcast(value, src=0, group=pair)
        dist.all_gather([torch.empty(4, 3) for _ in range(world_size)], value)
    dist.barrier()


def healthy(rank: int, world_size: int, folder: Path, steps: int) -> None:
    _some_steps(rank, world_size, steps)
    _write(rank, folder, _all_done)
    FileBarrier(folder, world_size).wait(rank)


def one_does_not_join(rank: int, world_size: int, folder: Path) -> None:
    _some_steps(rank, world_size, 3)
    work = dist.all_reduce(torch.ones(7), async_op=True) if rank != 1 else None
    _write(rank, folder, _all_done if work is None else lambda dump: not dump["entries"][-1]["retired"])
    FileBarrier(folder, world_size).wait(rank)
    os._exit(0)  # the call that is open would make an orderly end wait for its timeout


def another_shape(rank: int, world_size: int, folder: Path) -> None:
    """Rank 0 stays away, for the meeting of two shapes would abort a rank before it can write."""
    _some_steps(rank, world_size, 2)
    calls = len(pickle.loads(torch._C._distributed_c10d._dump_fr_trace())["entries"])
    if rank != 0:
        dist.all_reduce(torch.ones(9 if rank == 2 else 7), async_op=True)
        _write(rank, folder, lambda dump: len(dump["entries"]) > calls)
    FileBarrier(folder, world_size).wait(rank)
    os._exit(0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pickle").mkdir()
    (tmp_path / "json").mkdir()
    return tmp_path


def analyses(folder: Path) -> list[DumpAnalysis]:
    return [analyse_dumps(load_dumps(folder / kind)) for kind in ("pickle", "json")]


@pytest.mark.parametrize("ring", [2000, 7], ids=["whole", "wrapped"])
def test_healthy_job(folder: Path, ring: int):
    run_ranks(healthy, 3, folder, 6, env={"TORCH_FR_BUFFER_SIZE": str(ring)})
    for analysis in analyses(folder):
        assert (analysis.findings, analysis.missing_ranks, analysis.problems) == ((), (), ())
        assert analysis.world_size == 3


def test_rank_that_does_not_join(folder: Path):
    run_ranks(one_does_not_join, 3, folder, expect_exit={0: None, 1: None, 2: None})
    for analysis in analyses(folder):
        (finding,) = analysis.findings
        assert (finding.code, finding.ranks, finding.confidence) == (
            "rank-not-joined",
            (1,),
            Confidence.LIKELY,
        )
        assert "rank 1 has not issued all_reduce [7] Float" in finding.summary
        assert "ranks 0 and 2 wait" in finding.summary
    with_stacks = analyses(folder)[0].findings[0]
    assert "test_flight_recorder_real.py" in with_stacks.summary
    assert "in one_does_not_join" in with_stacks.summary


def test_its_dump_is_missing(folder: Path):
    run_ranks(one_does_not_join, 3, folder, expect_exit={0: None, 1: None, 2: None})
    (folder / "pickle" / "trace_rank_1").unlink()
    analysis = analyses(folder)[0]
    assert analysis.missing_ranks == (1,)
    assert [(f.code, f.ranks) for f in analysis.findings] == [("dumps-missing", ())]


def test_ranks_that_disagree_on_the_shape(folder: Path):
    run_ranks(another_shape, 3, folder, expect_exit={0: None, 1: None, 2: None})
    for late in ((), ("barrier",), ("barrier", "broadcast")):
        for path in (folder / "pickle").iterdir():
            _forget_ends(path, late)
        for analysis in analyses(folder):
            (finding,) = analysis.findings
            assert (finding.code, finding.confidence) == ("shape-mismatch", Confidence.POSSIBLE)
            assert "rank 1 called all_reduce [7] Float" in finding.summary
            assert "rank 2 called all_reduce [9] Float" in finding.summary


def _forget_ends(path: Path, of: tuple[str, ...]) -> None:
    """As on a machine so busy that the dump was written before the recorder noted the ends of the newest such calls."""
    dump, times = pickle.loads(path.read_bytes()), path.stat()
    for name in of:
        calls = [entry for entry in dump["entries"] if name in entry["profiling_name"]]
        for entry in calls[-1:]:
            entry["retired"] = False
    path.write_bytes(pickle.dumps(dump))
    os.utime(path, (times.st_mtime, times.st_mtime))
