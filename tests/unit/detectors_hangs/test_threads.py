"""A rank whose main thread waits for a thread of its own that communicates: an asynchronous checkpoint."""

from __future__ import annotations

import pytest

from dtobs.events import RankState
from dtobs.host.process import ProcessState
from dtobs.testing.fake_run import FakeRun
from tests.unit.detectors_hangs.trouble import captured, found, stack

SAVING = stack(
    "/x/dtobs/probes/patches.py:58 wrapper",
    "/x/site-packages/torch/distributed/distributed_c10d.py:3631 gather_object",
    "/x/site-packages/torch/distributed/checkpoint/utils.py:135 gather_object",
    "/usr/lib/python3.11/threading.py:1002 _bootstrap",
)
MAIN = stack(
    "/usr/lib/python3.11/threading.py:327 wait",
    "/usr/lib/python3.11/concurrent/futures/_base.py:451 result",
    "/home/me/train.py:22 main",
)
IN_BACKWARD = stack("/x/site-packages/torch/autograd/graph.py:829 _engine_run_backward", "/home/me/train.py:16 main")


def _trained(run: FakeRun, steps: int) -> None:
    for _ in range(steps):
        for rank in run.ranks:
            rank.collective().step()


def _saves(run: FakeRun) -> int:
    """Every rank has saved twice, in a thread beside; the number of the group they do it in."""
    saves = run.group("saves", (0, 1))
    for _ in range(2):
        for rank in run.ranks:
            rank.collective("gather", group=saves, thread=7)
        _trained(run, 5)
    return saves


def _skipped(run: FakeRun) -> FakeRun:
    """Rank 0 has begun a third save, and rank 1 has gone on without it for five steps."""
    run.rank(0).collective("gather", group=_saves(run), thread=7)
    _trained(run, 5)
    run.rank(1).phase("backward").collective(wait=True)
    return run


def test_who_skipped_an_asynchronous_save_is_named_and_not_who_waits_for_it(training):
    run = _skipped(training(2))
    view = captured(run.view(later=75), rank_0=SAVING + MAIN, rank_1=IN_BACKWARD)
    (finding,) = found(view).values()
    assert (finding.code, finding.ranks, finding.confidence) == ("rank-not-joined", (1,), "likely")
    assert "rank 0 waits in gather(sum, float32[1024]) #3 of group saves" in finding.summary
    assert "rank 1 went on for 4 steps without it" in finding.summary


def test_who_is_late_with_its_own_save_is_said_to_be_at_it(training):
    run = _skipped(training(2))
    writes = stack("/x/site-packages/torch/distributed/checkpoint/filesystem.py:91 write", "/usr/threading.py:1 run")
    view = captured(run.view(later=75), rank_0=SAVING + MAIN, rank_1=writes + IN_BACKWARD)
    (finding,) = found(view).values()
    assert finding.ranks == (1,)
    assert "rank 1, a thread of which is still at /x/site-packages/torch/distributed/checkpoint/fi" in finding.summary


@pytest.mark.parametrize("thread", [SAVING, stack("/home/me/upload.py:4 put", "/usr/threading.py:1 run")])
def test_without_the_call_nobody_else_is_accused_and_the_wait_is_said(training, thread):
    """What the thread called may have rolled out of the recording; and it may not communicate at all."""
    run = training(2)
    _trained(run, 5)
    run.rank(1).phase("backward").collective(wait=True)
    view = captured(run.view(later=75), rank_0=thread + MAIN, rank_1=IN_BACKWARD)
    (finding,) = found(view).values()
    assert (finding.code, finding.ranks) == ("rank-not-joined", (0,))
    if thread is SAVING:
        assert finding.confidence == "possible"
        assert "it waits for a thread of its own, which is in gather_object" in finding.summary
    else:
        assert finding.confidence == "likely"
        assert "at /home/me/train.py:22 in main, where it waits for a thread of its own, which is at" in finding.summary
        assert "/home/me/upload.py:4 in put" in finding.summary


@pytest.mark.parametrize(
    "threads",
    [
        stack("/usr/lib/python3.11/queue.py:171 get", "/home/me/upload.py:4 put"),  # idle
        stack("/x/site-packages/tqdm/_monitor.py:60 run"),  # nobody's of this program
        stack("/home/me/a.py:4 put") + stack("/home/me/b.py:4 put"),  # which of them it waits for is not known
    ],
)
def test_a_thread_that_is_idle_or_one_of_several_is_not_told(training, threads):
    run = training(2)
    _trained(run, 5)
    run.rank(1).phase("backward").collective(wait=True)
    (finding,) = found(captured(run.view(later=75), rank_0=threads + MAIN, rank_1=IN_BACKWARD)).values()
    assert (finding.code, finding.ranks) == ("rank-not-joined", (0,))
    assert "a thread of its own" not in finding.summary


def test_a_save_that_all_have_joined_accuses_nobody_of_it(training):
    run = training(2)
    _saves(run)
    run.rank(1).phase("backward").collective(wait=True)
    view = captured(run.view(later=75), rank_0=SAVING + MAIN, rank_1=IN_BACKWARD)
    (finding,) = found(view).values()
    assert (finding.ranks, finding.confidence) == ((0,), "possible")


def test_who_ended_without_the_last_save_is_named(training):
    run = training(2)
    saves = _saves(run)
    run.rank(0).collective("gather", group=saves, thread=7)
    failed = "gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:24776"
    run.rank(0).meta("exception", type="RuntimeError", message=failed, step=10, t_ns=run.rank(0).clock_ns)
    run.rank(0).close(RankState.FAILED)
    run.rank(1).close()
    (finding,) = found(run.view(later=5)).values()
    assert (finding.code, finding.ranks) == ("rank-exited-early", (1,))
    assert "in gather(sum, float32[1024]) #3 of group saves" in finding.summary


@pytest.mark.parametrize(
    ("wchan", "beside", "told"),
    [
        ("futex_do_wait", "/home/me/upload.py:4 put", True),
        ("futex_do_wait", "/x/site-packages/wandb/sdk/lib.py:9 run", False),  # nobody's of this program
        ("", "/home/me/upload.py:4 put", False),  # it computes
    ],
)
def test_of_a_rank_that_waits_for_a_lock_the_line_of_its_other_thread_is_told(training, wchan, beside, told):
    """Two locks taken in two orders: ``with lock:`` is no frame of its own."""
    run = training(2)
    run.rank(0).phase("backward").collective(wait=True)
    run.rank(1).phase("forward")
    view = run.view(later=75, processes={1: ProcessState(1, alive=True, state="S", wchan=wchan)})
    (finding,) = found(captured(view, rank_1=stack(beside) + stack("/home/me/train.py:9 main"))).values()
    said = "where it waits for a lock or a thread, while a thread of its own is at /home/me/upload.py:4 in put"
    assert (said in finding.summary) == told
    alone = ", where it waits for a lock or a thread of its own"
    assert (alone in finding.summary) == (bool(wchan) and not told)


@pytest.mark.parametrize("waits", [True, False])
def test_a_thread_that_an_exception_has_ended_is_told_of_a_rank_that_waits_for_its_threads(training, waits: bool):
    run = training(2)
    run.rank(0).phase("backward").collective(wait=True)
    frame = {"file": "/home/me/data.py", "line": 4, "function": "fill"}
    said = {"type": "builtins.KeyError", "message": "'tokens'", "thread": "prefetch", "t_ns": 1, "frame": frame}
    run.rank(1).meta("exception", **said)
    view = captured(run.view(later=75), rank_1=MAIN if waits else stack("/home/me/train.py:9 main"))
    (finding,) = found(view).values()
    assert (finding.code, finding.ranks) == ("rank-not-joined", (1,))
    ended = "prefetch has ended by KeyError: 'tokens' at /home/me/data.py:4 in fill"
    told = f"where it waits for its threads, of which {ended}"
    assert (told in finding.summary) == waits
    assert ("Fix what that thread raised" in finding.next_step) == waits


def test_a_rank_that_waits_for_a_pool_is_not_said_to_wait_for_a_thread(training):
    run = training(2)
    run.rank(0).phase("backward").collective(wait=True)
    pool = stack(
        "/usr/lib/python3.11/threading.py:327 wait", "/usr/lib/python3.11/multiprocessing/pool.py:9 get", "/a.py:1 f"
    )
    view = captured(run.view(later=75), rank_1=stack("/home/me/log.py:4 write") + pool)
    (finding,) = found(view).values()
    assert "a thread of its own" not in finding.summary
