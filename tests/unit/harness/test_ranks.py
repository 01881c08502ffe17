"""The harness itself: values, failures, hangs with stacks, killed ranks, and nothing left behind."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from tests.harness import (
    FileBarrier,
    Gate,
    RankFailure,
    RankTimeout,
    is_alive,
    run_ranks,
    start_ranks,
    wait_until_gone,
)

pytestmark = pytest.mark.slow  # processes of its own


def sum_of_ranks(rank: int, world_size: int, offset: float) -> float:
    value = torch.tensor([rank + offset])
    dist.all_reduce(value)
    return value.item()


def environment(rank: int, world_size: int) -> tuple[str, ...]:
    print(f"hello from {rank}")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "EXTRA")
    return (*(os.environ[n] for n in names), str(torch.get_num_threads()), str("HOME" in os.environ))


def raise_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("no such shard")
    dist.barrier()


def exit_on_rank_1(rank: int, world_size: int) -> str:
    if rank == 1:
        os._exit(7)
    return "alive"


def the_line_that_hangs(gate: Gate) -> None:
    gate.wait(300)


def hang_on_rank_1(rank: int, world_size: int, gate: Gate) -> None:
    if rank == 1:
        the_line_that_hangs(gate)


def wait_at_gate(rank: int, world_size: int, barrier: FileBarrier, gate: Gate) -> str:
    barrier.wait(rank)
    gate.wait(60)
    return "through"


def start_a_child_and_hang(rank: int, world_size: int, barrier: FileBarrier, gate: Gate) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    (barrier.folder / "child").write_text(str(child.pid))
    barrier.wait(rank)
    gate.wait(300)


def returns_a_lock(rank: int, world_size: int) -> object:
    return threading.Lock()


def many_collectives(rank: int, world_size: int) -> int:
    for _ in range(20):
        dist.all_reduce(torch.ones(1000))
    return rank


def test_values_in_rank_order():
    assert [r.value for r in run_ranks(sum_of_ranks, 2, 10.0)] == [21.0, 21.0]


def test_environment_is_that_of_a_torchrun_worker():
    results = run_ranks(environment, 2, env={"EXTRA": "x", "HOME": None}, init_pg=False)
    assert [r.value for r in results] == [(str(n), str(n), "2", "2", "0", "x", "1", "False") for n in range(2)]
    assert results[1].stdout.read_text() == "hello from 1\n"


def test_exception_is_reported_with_rank_and_traceback():
    with pytest.raises(RankFailure, match=r"rank 1 ended with exit code 1\n(.|\n)*no such shard"):
        run_ranks(raise_on_rank_1, 2)


def test_expected_exception_is_a_result():
    results = run_ranks(raise_on_rank_1, 2, expect_exit={0: None, 1: 1})
    assert results[1].exception_type == "ValueError"
    assert not results[1].ok


def test_exit_code_without_exception():
    with pytest.raises(RankFailure, match="rank 1 ended with exit code 7"):
        run_ranks(exit_on_rank_1, 2)
    results = run_ranks(exit_on_rank_1, 2, expect_exit={1: 7})
    assert [(r.value, r.exitcode) for r in results] == [("alive", 0), (None, 7)]


def test_a_rank_expected_to_fail_that_does_not_is_a_failure():
    with pytest.raises(RankFailure, match="rank 0 ended with exit code 0"):
        run_ranks(sum_of_ranks, 2, 0.0, expect_exit={0: -9})


def test_value_that_cannot_be_pickled_is_named():
    with pytest.raises(RankFailure, match="the value returned cannot be pickled"):
        run_ranks(returns_a_lock, 1, init_pg=False)


def test_deadline_shows_the_stacks_of_the_rank_that_hangs(tmp_path):
    with pytest.raises(RankTimeout) as caught:
        run_ranks(hang_on_rank_1, 2, Gate(tmp_path / "gate"), timeout=2)
    text = str(caught.value)
    assert re.search(r"--- rank 1 \(process \d+, state [SR]\)", text)
    assert "the_line_that_hangs" in text
    assert "--- rank 0" not in text


def test_kill_one_rank(tmp_path):
    gate = Gate(tmp_path / "gate")
    with start_ranks(wait_at_gate, 2, FileBarrier(tmp_path, 3), gate, init_pg=False) as group:
        FileBarrier(tmp_path, 3).wait(2)
        group.kill(1)
        assert wait_until_gone([group.pids[1]], timeout=10) == []
        gate.open()
        assert group.wait(timeout=30)
        results = group.results()
    assert (results[0].value, results[1].signal) == ("through", signal.SIGKILL)


def test_stopped_rank_is_shown_as_such(tmp_path):
    with start_ranks(wait_at_gate, 1, FileBarrier(tmp_path, 2), Gate(tmp_path / "gate"), init_pg=False) as group:
        FileBarrier(tmp_path, 2).wait(1)
        group.kill(0, signal.SIGSTOP)
        assert not group.wait(timeout=0.2)
        assert "state T" in group.stacks()
    assert wait_until_gone(group.pids, timeout=10) == []


def test_nothing_is_left_behind(tmp_path):
    barrier = FileBarrier(tmp_path, 2)
    with start_ranks(start_a_child_and_hang, 1, barrier, Gate(tmp_path / "gate"), init_pg=False) as group:
        barrier.wait(1)
        child = int((tmp_path / "child").read_text())
        assert is_alive(child)
    assert wait_until_gone([child, *group.pids], timeout=10) == []


def test_ranks_end_cleanly_every_time():
    for _ in range(20):
        assert [r.value for r in run_ranks(many_collectives, 2)] == [0, 1]


def shared_with_the_server(rank: int, world_size: int) -> tuple[bool, int]:
    return "tests.harness.preloaded" in sys.modules, gc.get_freeze_count()


def test_what_the_server_imported_is_not_looked_through_by_ranks():
    (rank,) = run_ranks(shared_with_the_server, 1, init_pg=False)
    imported, frozen = rank.value
    assert imported and frozen > 100_000
