"""Ranks that ended: the first cause is named; lost connections, timeouts and terminated ranks are its consequences."""

from __future__ import annotations

import os

import pytest

from dtobs.diagnose import diagnose
from dtobs.diagnose.gather import Evidence
from dtobs.events import RankState
from dtobs.host.process import ProcessState
from dtobs.testing.fake_run import FakeRank, FakeRun
from tests.unit.detectors_hangs.trouble import found

GLOO_CLOSED = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"
GLOO_TIMEOUT = "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv"
GLOO_SIZE = "[enforce fail at gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 8192 vs 4096"


def fails(rank: FakeRank, type_: str, message: str, **fields: object) -> None:
    """The rank raises now and ends."""
    given = {"t_ns": rank.clock_ns, "step": rank.next_step, "traceback": ["Traceback", "  boom"]} | fields
    rank.meta("exception", type=type_, message=message, **given)
    rank.close(RankState.FAILED)


def gone(code: int | None, pid: int = 77, oom: bool = False, ended_ns: int = 0) -> ProcessState:
    return ProcessState(pid, alive=False, exit_code=code, oom_killed=oom, ended_ns=ended_ns)


@pytest.mark.parametrize(
    ("how", "advice"),
    [
        ("(pid 21644) is killed by signal: Killed. ", "no memory left"),
        ("(pid 5) is killed by signal: Bus error. It is possible that", "/dev/shm is full"),
        ("(pid(s) 12, 13) exited unexpectedly", "What the worker printed"),
        ("is what I am", "Fix the exception at the line shown"),
    ],
)
def test_a_workers_end_is_no_fault_of_the_line_at_which_the_rank_is_told(training, how: str, advice: str):
    run = training(2)
    fails(run.rank(1), "RuntimeError", f"DataLoader worker {how}")
    (finding,) = found(run.view(later=1)).values()
    assert finding.code == "uncaught-exception"
    assert advice in finding.next_step
    assert ("the line is only where" in finding.next_step) is ("what I am" not in how)


def test_uncaught_exception_is_found_at_once_with_its_line(training):
    run = training(2)
    run.rank(0).collective(wait=True)
    frame = {"file": "/me/train.py", "line": 12, "function": "load"}
    fails(run.rank(1), "ValueError", "bad sample 17", frame=frame)
    (finding,) = found(run.view(later=1)).values()
    assert (finding.code, finding.ranks, finding.confidence) == ("uncaught-exception", (1,), "certain")
    assert finding.summary == "rank 1 raised ValueError: bad sample 17 at /me/train.py:12 in load"
    assert finding.evidence[0]["traceback"] == ["Traceback", "  boom"]


def test_a_device_without_memory_is_no_mere_exception(training):
    """As torch 2.11 raised it on an H100."""
    run = training(2)
    run.rank(0).collective(wait=True)
    told = (
        "CUDA out of memory. Tried to allocate 12.50 GiB. GPU 0 has a total capacity of 79.18 GiB of which 4.45 GiB is"
        " free. Process 998 has 1.17 GiB memory in use."
    )
    fails(run.rank(1), "torch.OutOfMemoryError", told, frame={"file": "/me/train.py", "line": 12, "function": "step"})
    (finding,) = found(run.view(later=1)).values()
    assert (finding.code, finding.ranks, finding.confidence) == ("device-out-of-memory", (1,), "certain")
    assert finding.summary == "rank 1 ran out of device memory while it asked for 12.50 GiB at /me/train.py:12 in step"
    assert finding.evidence[0]["message"] == told


@pytest.mark.parametrize(
    ("type_", "message"),
    [
        ("RuntimeError", GLOO_CLOSED),
        (
            "torch.distributed.DistBackendError",
            "NCCL error: remote process exited or there was a network error",
        ),
        ("RuntimeError", GLOO_TIMEOUT),
        ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
        ("torch.distributed.DistNetworkError", "The client socket has timed out after 60s"),
    ],
)
def test_consequences_of_an_exception_are_not_accused(training, type_, message):
    run = training(3)
    fails(run.rank(1).advance(-1), "ValueError", "bad sample")
    fails(run.rank(0), type_, message)
    fails(run.rank(2), type_, message)
    (finding,) = found(run.view(later=100)).values()
    assert (finding.code, finding.ranks) == ("uncaught-exception", (1,))


def test_a_users_own_timeout_is_a_cause(training):
    run = training(2)
    fails(run.rank(1), "TimeoutError", "the feature store did not answer within 30 s")
    fails(run.rank(0), "RuntimeError", GLOO_CLOSED)
    assert found(run.view(later=1))["uncaught-exception"].ranks == (1,)


def test_the_same_exception_on_all_ranks_is_one_finding(training):
    run = training(3)
    for rank in run.ranks:
        fails(rank, "IndexError", "index out of range")
    (finding,) = found(run.view(later=1)).values()
    assert finding.ranks == (0, 1, 2)


def test_ranks_terminated_by_the_launcher_are_innocent(training):
    run = training(3)
    fails(run.rank(2), "ValueError", "bad sample")
    view = run.view(later=1, processes={0: gone(-15), 1: gone(-15), 2: gone(1)})
    (finding,) = found(view).values()
    assert (finding.code, finding.ranks) == ("uncaught-exception", (2,))


def test_killed_rank(training):
    run = training(2)
    run.rank(0).collective(wait=True)
    (finding,) = found(run.view(later=1, processes={1: gone(-9)})).values()
    assert (finding.code, finding.ranks, finding.confidence) == ("rank-dead", (1,), "certain")
    assert "killed by SIGKILL" in finding.summary


@pytest.mark.parametrize(
    ("code", "word"),
    [(-10, "sbatch --signal"), (-11, "PYTHONFAULTHANDLER"), (-7, "/dev/shm"), (-24, "ulimit -t"), (3, "printed last")],
)
def test_what_to_do_about_a_death_follows_from_its_signal(training, code, word):
    run = training(2)
    (finding,) = found(run.view(later=1, processes={1: gone(code)})).values()
    assert finding.code == "rank-dead" and word in finding.next_step


def test_killed_rank_and_peers_that_lost_it(training):
    run = training(2)
    fails(run.rank(0), "RuntimeError", GLOO_CLOSED)
    (finding,) = found(run.view(later=1, processes={0: gone(1), 1: gone(-9)})).values()
    assert (finding.code, finding.ranks) == ("rank-dead", (1,))


def test_a_death_nobody_saw(training):
    run = training(2)
    fails(run.rank(0), "RuntimeError", GLOO_CLOSED)
    (finding,) = found(run.view(later=1, processes={0: gone(None), 1: gone(None)})).values()
    assert (finding.code, finding.ranks, finding.confidence) == ("rank-dead", (1,), "likely")


def test_all_ranks_gone_unseen_is_only_possible(training):
    run = training(2)
    (finding,) = found(run.view(later=1, processes={0: gone(None), 1: gone(None)})).values()
    assert (finding.code, finding.ranks, finding.confidence) == ("rank-dead", (0, 1), "possible")


def test_stragglers_killed_by_the_launcher_later_are_innocent(training):
    run = training(2)
    fails(run.rank(1), "ValueError", "bad sample")
    late = run.rank(1).clock_ns + 30 * 10**9
    (finding,) = found(run.view(later=40, processes={0: gone(-9, ended_ns=late), 1: gone(1)})).values()
    assert (finding.code, finding.ranks) == ("uncaught-exception", (1,))


def test_oom_kill_is_told_from_a_kill(training):
    run = training(2)
    (finding,) = found(run.view(later=1, processes={1: gone(-9, oom=True)})).values()
    assert (finding.code, finding.ranks) == ("rank-oom-killed", (1,))


def test_a_job_that_somebody_ended_is_no_finding(training):
    run = training(2)
    assert found(run.view(later=100, processes={0: gone(-15), 1: gone(-15)})) == {}


def test_ctrl_c_is_no_finding(training):
    run = training(2)
    for rank in run.ranks:
        fails(rank, "KeyboardInterrupt", "")
    assert found(run.view(later=100, processes={0: gone(-2), 1: gone(1)})) == {}


def test_one_terminated_rank_that_its_peers_lost(training):
    run = training(2)
    fails(run.rank(0), "RuntimeError", GLOO_CLOSED)
    (finding,) = found(run.view(later=1, processes={0: gone(1), 1: gone(-15)})).values()
    assert (finding.code, finding.ranks) == ("rank-dead", (1,))


def test_exited_early_while_peers_wait(training):
    run = training(2)
    run.rank(1).close()
    run.rank(0).step().collective(wait=True)
    assert found(run.view(later=5)) == {}, "peers may finish something of their own"
    (finding,) = found(run.view(later=61, processes={1: gone(0)})).values()
    assert (finding.code, finding.ranks) == ("rank-exited-early", (1,))
    assert "rank 1 ended normally after 20 steps, of which its peers did 21" in finding.summary


def test_exited_early_by_a_call_of_exit(training):
    run = training(2)
    run.rank(1).meta("process", left_at={"file": "a.py", "line": 9, "function": "stop"}).close()
    run.rank(0).collective(wait=True)
    (finding,) = found(run.view(later=61, processes={1: gone(0)})).values()
    assert "rank 1 ended normally by sys.exit at a.py:9 in stop after 20 steps, while" in finding.summary


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        (((1, 2), (1, 1)), True),
        (((2, 4), (2, 2)), True),
        (((1, 2), (1, 2)), False),  # its peer does so as well
        (((1, 1), (1, 2)), False),  # what is left over at the end of an epoch
    ],
)
def test_exited_early_because_it_skipped_a_batch(tmp_path, batches, said):
    run = FakeRun(tmp_path, 2)
    for rank, (usual, odd) in zip(reversed(run.ranks), batches, strict=True):
        for step in range(20):
            rank.step(micro_batches=odd if step == 12 else usual).collective()
    run.rank(1).close()
    run.rank(0).collective(wait=True)
    (finding,) = found(run.view(later=61, processes={1: gone(0)})).values()
    assert (finding.code, finding.ranks) == ("rank-exited-early", (1,))
    assert ("; in step 12 it went through" in finding.summary) == said
    assert ("skip a batch" in finding.next_step) == said


def test_exited_early_and_the_connection_was_lost(training):
    run = training(2)
    run.rank(1).close()
    run.rank(0).collective()
    fails(run.rank(0), "RuntimeError", GLOO_CLOSED)
    (finding,) = found(run.view(later=1, processes={0: gone(1), 1: gone(0)})).values()
    assert (finding.code, finding.ranks) == ("rank-exited-early", (1,))


def test_exit_without_closing_counts_as_exit(training):
    run = training(2)
    run.rank(0).collective(wait=True)
    (finding,) = found(run.view(later=61, processes={1: gone(0)})).values()
    assert (finding.code, finding.ranks) == ("rank-exited-early", (1,))


def test_a_timeout_is_explained_by_the_rank_that_was_missing(training):
    """Rank 0 gave up, the launcher then terminated rank 1, which had never joined."""
    run = training(2)
    run.rank(1).phase("data")
    run.rank(0).collective(wait=True).advance(5)
    fails(run.rank(0), "RuntimeError", GLOO_TIMEOUT)
    (finding,) = found(run.view(later=1, processes={0: gone(1), 1: gone(-15)})).values()
    assert (finding.code, finding.ranks) == ("stuck-in-dataloader", (1,))


def test_a_lost_connection_that_nothing_explains_is_possible(training):
    run = training(2)
    fails(run.rank(0), "RuntimeError", GLOO_CLOSED)
    (finding,) = found(run.view(later=1)).values()
    assert (finding.code, finding.ranks, finding.confidence) == ("uncaught-exception", (0,), "possible")
    assert finding.summary == "rank 0 lost the connection to a peer; nothing recorded says which peer, or why"
    assert finding.next_step.startswith("Look in the console for the rank that failed before this one")


def test_a_connection_to_a_rank_without_a_recording_was_lost(tmp_path):
    run = FakeRun(tmp_path / "run", 3)
    run.rank(0).step()
    fails(run.rank(0), "RuntimeError", GLOO_CLOSED)
    (finding,) = found(run.view(later=1)).values()
    assert finding.summary.endswith("; nothing is recorded of ranks 1 and 2")


def test_a_stage_that_ended_a_batch_early_is_named_where_only_messages_are_sent(tmp_path):
    """A stage skipped one step of a pipeline, and left while its neighbours wait for its next message."""
    run = FakeRun(tmp_path / "run", 3)
    for rank in run.ranks:
        for _ in range(19 if rank.number == 1 else 20):
            rank.step()
    run.rank(1).close()
    for number in (0, 2):
        fails(run.rank(number), "RuntimeError", GLOO_CLOSED)
    processes = {0: gone(1), 1: gone(0), 2: gone(-15)}
    (finding,) = found(run.view(later=1, processes=processes)).values()
    assert (finding.code, finding.ranks) == ("rank-exited-early", (1,))
    assert finding.summary == (
        "rank 1 ended normally after 19 steps, of which its peers did 20, and ranks 0 and 2 lost the connection to it"
    )


def test_abort_of_a_communication_library_is_explained_by_the_mismatch(training):
    from dtobs.recording.meta import Op

    run = training(3)
    for number, size in enumerate((4, 8, 4)):
        run.rank(number).collective(Op("all_reduce", "sum", ((size,),), ("float32",)))
    fails(run.rank(0), "RuntimeError", GLOO_SIZE)
    view = run.view(later=1, processes={0: gone(1), 2: gone(-6)})
    (finding,) = found(view).values()
    assert (finding.code, finding.ranks) == ("shape-mismatch", (1,))


def test_unexplained_abort_is_a_death(training):
    run = training(2)
    (finding,) = found(run.view(later=1, processes={1: gone(-6)})).values()
    assert (finding.code, finding.ranks, finding.confidence) == ("rank-dead", (1,), "likely")


STAGE = {"message": "[Stage 1] failed to run forward", "type_": "RuntimeError"}


@pytest.mark.parametrize("how", ["chain", "traceback"])
@pytest.mark.parametrize("before", [-1.0, 1.0])
def test_what_a_pipeline_raises_from_a_broken_connection_is_a_consequence(training, how, before):
    """Whatever the order of deaths, and in recordings that hold the chain as text only."""
    run = training(4)
    chain = [{"type": "RuntimeError", "message": GLOO_CLOSED, "file": "/torch/distributed/pipelining/schedules.py"}]
    text = [f"RuntimeError: {GLOO_CLOSED}", "", "The above exception was the direct cause of the following exception:"]
    said = {"chain": chain} if how == "chain" else {"traceback": ["Traceback", *text, "", "RuntimeError: [Stage 1]"]}
    died = run.rank(3).clock_ns
    fails(run.rank(2).advance(before), **STAGE, **said)
    fails(run.rank(0).advance(before), "RuntimeError", GLOO_CLOSED)
    gone_ = {2: gone(1), 0: gone(1), 1: gone(-15), 3: gone(-9, ended_ns=died)}
    (finding,) = found(run.view(later=3, processes=gone_)).values()
    assert (finding.code, finding.ranks) == ("rank-dead", (3,))


def test_a_user_error_raised_from_another_stays_a_cause(training):
    run = training(2)
    fails(run.rank(1), "ValueError", "bad sample", chain=[{"type": "KeyError", "message": "'x'", "how": "cause"}])
    fails(run.rank(0), "RuntimeError", GLOO_CLOSED)
    (finding,) = found(run.view(later=1)).values()
    assert (finding.ranks, finding.summary) == (
        (1,),
        "rank 1 raised ValueError: bad sample (raised from KeyError: 'x')",
    )


def test_a_users_dropped_connection_in_the_chain_is_its_own(training):
    run = training(2)
    web = {"type": "ConnectionResetError", "message": "reset by peer", "file": "/lib/urllib3/connection.py"}
    fails(run.rank(1), "ValueError", "no sample", chain=[web])
    (finding,) = found(run.view(later=1)).values()
    assert (finding.code, finding.ranks, finding.confidence) == ("uncaught-exception", (1,), "certain")


def interrupted(rank: FakeRank) -> None:
    rank.meta("exception", type="KeyboardInterrupt", message="", t_ns=rank.clock_ns)
    rank.close()


def hears(run: FakeRun, rank: int, number: int) -> None:
    path = run.directory.signals(rank, 0)
    path.write_bytes(bytes([number]) + bytes(63))


@pytest.mark.parametrize("after", [True, False])
def test_what_a_rank_calls_because_it_was_told_to_end_is_not_what_stopped_the_run(training, after: bool):
    """Lightning broadcasts from its handler of SIGTERM; without the signal it is a call that does not fit."""
    run = training(2)
    run.rank(0).phase("backward").collective("all_reduce", wait=True)
    run.rank(1).phase("validation").advance(20)
    hears(run, 1, 15)
    offset_ns = int(run.view().page(1)["clock_offset_ns"])
    told_ns = run.rank(1).clock_ns + offset_ns + (-1 if after else 1) * 10**9
    os.utime(run.directory.signals(1, 0), ns=(told_ns, told_ns))
    run.rank(1).collective("broadcast", wait=True)
    (finding,) = found(run.view(later=400)).values()
    assert (finding.code, finding.ranks) == (("rank-not-joined", (1,)) if after else ("collective-mismatch", (0, 1)))


def test_one_interrupted_rank_is_named(training):
    run = training(3)
    interrupted(run.rank(0))
    hears(run, 0, 2)
    fails(run.rank(1).advance(1), "RuntimeError", GLOO_CLOSED)
    late = run.rank(0).clock_ns + 2 * 10**9
    ended = {0: gone(130), 1: gone(1), 2: gone(-15, ended_ns=late)}
    (finding,) = found(run.view(later=3, processes=ended)).values()
    assert (finding.code, finding.ranks) == ("rank-dead", (0,))
    assert "was interrupted by SIGINT" in finding.summary and "others were not" in finding.next_step


def test_one_interrupted_rank_that_closed_its_session_on_the_way_out_is_named(training):
    run = training(3)
    run.rank(0).close()
    hears(run, 0, 2)
    fails(run.rank(1).advance(1), "RuntimeError", GLOO_CLOSED)
    late = run.rank(0).clock_ns + 2 * 10**9
    (finding,) = found(run.view(later=3, processes={0: gone(130), 1: gone(1), 2: gone(-15, ended_ns=late)})).values()
    assert (finding.code, finding.ranks) == ("rank-dead", (0,))


def test_ctrl_c_that_one_rank_could_not_hear_in_native_code_is_no_finding(training):
    """Rank 1 was inside a collective, and raised what its peer's end made of it before it could be interrupted."""
    run = training(2)
    interrupted(run.rank(0))
    hears(run, 0, 2)
    hears(run, 1, 2)
    fails(run.rank(1), "RuntimeError", GLOO_CLOSED)
    assert found(run.view(later=3, processes={0: gone(130), 1: gone(1)})) == {}


def test_a_rank_that_heard_the_end_of_the_job_and_is_not_out_yet_was_told_as_well(training):
    """Rank 1 sits in native code, and its handler of SIGTERM has not run."""
    run = training(2)
    run.rank(1).phase("forward").collective(wait=True)
    (finding,) = found(run.view(later=70, processes={0: gone(-15)})).values()
    assert (finding.code, finding.ranks) == ("rank-dead", (0,))
    hears(run, 1, 15)
    assert "rank-dead" not in found(run.view(later=70, processes={0: gone(-15)}))


def test_segfault_names_its_rank(training):
    run = training(2)
    fails(run.rank(1), "RuntimeError", GLOO_CLOSED)
    (finding,) = found(run.view(later=1, processes={0: gone(-11), 1: gone(1)})).values()
    assert (finding.code, finding.ranks) == ("rank-dead", (0,))
    assert "SIGSEGV" in finding.summary


def test_one_terminated_rank_of_many_is_told_from_those_the_launcher_ended(training):
    run = training(4)
    t = run.rank(0).clock_ns
    fails(run.rank(0), "RuntimeError", GLOO_CLOSED)
    ended = {0: gone(1), 1: gone(-15, ended_ns=t - 10**9), 2: gone(-15, ended_ns=t), 3: gone(-15, ended_ns=t)}
    (finding,) = found(run.view(later=1, processes=ended)).values()
    assert (finding.code, finding.ranks) == ("rank-dead", (1,))


def test_a_rank_that_left_because_another_died_is_no_cause(training):
    run = training(2)
    t = run.rank(0).clock_ns
    ended = {0: gone(-9, ended_ns=t), 1: gone(1, ended_ns=t + 10**9)}
    (finding,) = found(run.view(later=3, processes=ended)).values()
    assert (finding.code, finding.ranks) == ("rank-dead", (0,))


def test_leaving_with_an_exit_code_is_no_normal_end(training):
    run = training(2)
    run.rank(1).meta("exception", type="SystemExit", message="3", t_ns=run.rank(1).clock_ns)
    run.rank(1).close()
    run.rank(0).step().collective(wait=True)
    (finding,) = found(run.view(later=61, processes={1: gone(3)})).values()
    assert (finding.code, finding.ranks) == ("rank-exited-early", (1,))
    assert "left with exit code 3" in finding.summary and "sys.exit" in finding.next_step


@pytest.mark.parametrize(
    ("codes", "said"),
    [
        ((3, 3), ["ranks 0 and 1 left with exit code 3 at train.py:9 in main (no data)"]),
        ((0, 3), ["rank 1 left with exit code 3 at train.py:9 in main (no data)"]),
        ((0, 0), []),
        ((-6, -6), []),  # Gloo aborts about one exit in ten
    ],
)
def test_a_job_that_all_ranks_left_with_an_exit_code(training, codes, said):
    run = training(2)
    frame = {"file": "train.py", "line": 9, "function": "main"}
    for rank, code in zip(run.ranks, codes, strict=True):
        if code > 0:
            rank.meta("exception", type="SystemExit", message="no data", frame=frame, t_ns=rank.clock_ns)
        rank.close()
    view = run.view(later=1, processes={r: gone(code) for r, code in enumerate(codes)})
    assert found(view) == {}
    assert [n for n in diagnose(Evidence(str(view.root), view)).notes if "left with" in n] == said


def test_who_leaves_with_a_code_of_its_own_because_it_lost_a_peer_is_no_cause(training):
    run = training(2)
    run.rank(0).collective(wait=True)
    for rank, why in ((run.rank(1), "ValueError: bad batch"), (run.rank(0), f"RuntimeError: {GLOO_CLOSED}")):
        rank.meta("exception", type="SystemExit", message=why, exit_code=7, t_ns=rank.clock_ns)
        rank.close()
    (finding,) = found(run.view(later=1, processes={0: gone(7), 1: gone(7)})).values()
    assert (finding.code, finding.ranks) == ("rank-exited-early", (1,))
    assert "rank 1 left with exit code 7 (ValueError: bad batch) after" in finding.summary


def test_what_a_handler_of_sigterm_raises_is_no_cause(training):
    run = training(2)
    for rank in run.ranks:
        fails(rank, "lightning.pytorch.utilities.exceptions.SIGTERMException", "")
    assert found(run.view(later=1, processes={0: gone(1), 1: gone(1)})) == {}


def test_a_suspended_rank_does_not_hear_that_the_job_was_told_to_end(training):
    run = training(2)
    run.rank(0).collective(wait=True)
    run.rank(1).phase("forward")
    ended = {0: gone(-15), 1: ProcessState(8, alive=True, state="T")}
    (finding,) = found(run.view(later=61, processes=ended)).values()
    assert (finding.code, finding.ranks) == ("rank-stopped", (1,))
