"""Ranks that are alive and do not move: the right one is named with the right code, the waiting ones never are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtobs.host.process import ProcessState
from dtobs.recording.meta import Site
from tests.unit.detectors_hangs.trouble import captured, found, stack


def test_a_healthy_run_has_no_finding(training):
    assert found(training(4).view(later=30)) == {}


def test_a_finished_run_has_no_finding(training):
    run = training(2)
    for rank in run.ranks:
        rank.close()
    dead = {0: ProcessState(1, alive=False, exit_code=0), 1: ProcessState(1, alive=False, exit_code=-6)}
    assert found(run.view(later=1000, processes=dead)) == {}, "an abort after the end is not the training's"


def test_rank_not_joined_names_the_line(training):
    run = training(3)
    for rank in (0, 2):
        run.rank(rank).phase("backward").collective(wait=True)
    run.rank(1).phase("forward")
    view = captured(run.view(later=75), rank_1=stack("/home/me/model.py:33 forward", "/home/me/train.py:9 main"))
    (finding,) = found(view).values()
    assert (finding.code, finding.ranks, finding.confidence) == ("rank-not-joined", (1,), "likely")
    assert finding.summary.startswith(
        "rank 1 has not joined: ranks 0 and 2 have waited 75 s in all_reduce(sum, float32[1024]) #21 of group default, "
        "and rank 1 is in forward at /home/me/model.py:33 in forward"
    )
    assert {"what": "last issued in the group", "group": "default", "seq": {"0": 21, "1": 20, "2": 21}} in (
        finding.evidence
    )


@pytest.mark.parametrize(
    ("phase", "there"),
    [
        ("forward", "is in forward at /home/me/train.py:9 in main, where it waits for the file /data/x, and has not"),
        ("data", "for data at /home/me/train.py:9 in main, where it waits for the file /data/x, while rank 0 has"),
    ],
)
def test_what_the_kernel_says_that_a_rank_waits_for(training, phase, there):
    run = training(2)
    run.rank(0).phase("backward").collective(wait=True)
    run.rank(1).phase(phase)
    view = captured(run.view(later=75), rank_1=stack("/home/me/train.py:9 main"))
    view.capture.ranks[1] = replace(view.capture.ranks[1], waits_for="the file /data/x")
    (finding,) = found(view).values()
    assert there in finding.summary
    view.capture = replace(view.capture, taken_ns=0)  # it has moved since
    assert "/data/x" not in str(found(view))


def test_a_rank_that_compiles_may_take_minutes(training):
    run = training(2)
    run.rank(0).phase("backward").collective(wait=True)
    run.rank(1).phase("forward")
    compiler = ("<string>:7 add", "/tmp/torchinductor_me/c.py:5 call", "/site-packages/torch/_inductor/graph.py:9 run")
    compiling = stack(*compiler, "/home/me/train.py:9 main")
    assert found(captured(run.view(later=75), rank_1=compiling)) == {}
    (finding,) = found(captured(run.view(later=4000), rank_1=compiling)).values()
    assert "at /home/me/train.py:9 in main and has" in finding.summary
    assert finding.summary.endswith("; torch compiles there, which may take minutes")
    assert "shape" in finding.next_step


@pytest.mark.parametrize(
    ("phase", "code"),
    [("forward", "rank-not-joined"), ("data", "stuck-in-dataloader"), ("checkpoint", "stuck-in-checkpoint")],
)
@pytest.mark.parametrize(("cores", "confidence"), [(1.0, "likely"), (0.1, "certain")])
def test_a_rank_that_is_seen_at_work_may_come_yet(training, phase, code, cores, confidence):
    run = training(2)
    run.rank(0).phase("backward").collective(wait=True)
    run.rank(1).phase(phase)
    view = captured(run.view(later=1000), rank_1=stack("/home/me/train.py:9 main"))
    view.cores = {0: 1.0, 1: cores}
    (finding,) = found(view).values()
    assert (finding.code, finding.ranks, finding.confidence) == (code, (1,), confidence)
    assert ("; it uses a processor core" in finding.summary) == (confidence == "likely")
    seen = {"what": "processor time", "rank": 1, "cores": cores}
    assert (seen in finding.evidence) == (confidence == "likely")


@pytest.mark.parametrize("phase", ["", "data", "checkpoint", "validation", "startup", "compile"])
@pytest.mark.parametrize("seconds", [5, 15, 60, 300])
@pytest.mark.parametrize(("cores", "state"), [(0.0, "S"), (0.0, "D"), (1.0, "R")])
def test_what_may_only_be_slow_is_never_certain(training, phase, seconds, cores, state):
    """A slow write, a download and a subprocess take no core; a validation and a tokenizer do: all may come yet."""
    run = training(2)
    for rank in run.ranks:
        rank.page(hang_timeout_ns=10**9)
    run.rank(0).phase("backward").collective(wait=True)
    if phase:
        run.rank(1).phase(phase)
    view = captured(run.view(later=seconds), rank_1=stack("/home/me/save.py:4 write", "/home/me/train.py:9 main"))
    view.cores = {0: 0.0, 1: cores}
    view.processes[1] = replace(view.processes[1], state=state)
    for asked in (True, False):
        view.asked = asked
        for finding in found(view).values():
            assert (finding.ranks, finding.confidence != "certain") == ((1,), True), finding
            assert "rank 0 has waited" in finding.summary and "/home/me/save.py:4" in finding.summary
            assert ("waits for a disk or a network file system" in finding.summary) == (state == "D")


def test_a_slow_disk_excuses_however_long_it_takes(training):
    run = training(2)
    run.rank(0).phase("backward").collective(wait=True)
    run.rank(1).phase("checkpoint")
    view = captured(run.view(later=5000), rank_1=stack("/home/me/save.py:4 write"))
    assert found(view)["stuck-in-checkpoint"].confidence == "certain"
    view.processes[1] = replace(view.processes[1], state="D")
    slow = found(view)["stuck-in-checkpoint"]
    assert slow.confidence == "likely"
    assert slow.summary.endswith("; rank 1 waits for a disk or a network file system, which may only be slow")


def test_rank_not_joined_without_a_stack_names_the_last_call(training):
    run = training(2)
    run.rank(0).collective(wait=True)
    run.rank(1).phase("optimizer")
    finding = found(run.view(later=75))["rank-not-joined"]
    assert finding.ranks == (1,)
    assert finding.confidence == "likely"
    assert "in optimizer somewhere after train.py:20 in train_step" in finding.summary


def test_slow_but_within_the_threshold_is_no_finding(training):
    run = training(2)
    run.rank(0).collective(wait=True)
    run.rank(1).phase("forward")
    assert found(run.view(later=50)) == {}


def test_data_loader_by_phase(training):
    run = training(2)
    run.rank(0).phase("backward").collective(wait=True)
    run.rank(1).phase("data")
    (finding,) = found(run.view(later=70)).values()
    assert (finding.code, finding.ranks) == ("stuck-in-dataloader", (1,))
    assert "rank 1 has waited 70 s for data somewhere after train.py:20 in train_step, while" in finding.summary
    assert "while rank 0 has waited 70 s in all_reduce" in finding.summary


def test_data_loader_by_stack(training):
    run = training(2)
    run.rank(0).collective(wait=True)
    run.rank(1).phase("forward").phase("")
    loader = stack(
        "/usr/lib/python3.11/threading.py:1 wait",
        "/x/site-packages/torch/utils/data/dataloader.py:7 _get",
        "/me.py:3 f",
    )
    (finding,) = found(captured(run.view(later=70), rank_1=loader)).values()
    assert (finding.code, finding.confidence) == ("stuck-in-dataloader", "likely")
    assert "at /me.py:3 in f" in finding.summary


def test_all_ranks_stuck_in_their_data_are_all_named(training):
    run = training(3)
    for rank in run.ranks:
        rank.phase("data")
    (finding,) = found(run.view(later=61)).values()
    assert (finding.code, finding.ranks) == ("stuck-in-dataloader", (0, 1, 2))


def test_a_rank_waiting_for_its_data_in_a_finished_epoch_is_not_accused_while_others_move(training):
    run = training(2)
    run.rank(1).phase("data")
    run.rank(0).advance(100).step()
    assert found(run.view(later=10)) == {}


def test_checkpoint_after_its_allowance(training):
    run = training(2)
    run.rank(0).phase("checkpoint")
    run.rank(1).collective("barrier", wait=True)
    assert found(run.view(later=470)) == {}
    (finding,) = found(run.view(later=490)).values()
    assert (finding.code, finding.ranks) == ("stuck-in-checkpoint", (0,))


def test_stopped_process(training):
    run = training(2)
    run.rank(0).collective(wait=True)
    run.rank(1).phase("forward")
    stopped = {1: ProcessState(4242, alive=True, state="T")}
    (finding,) = found(run.view(later=61, processes=stopped)).values()
    assert (finding.code, finding.ranks, finding.confidence) == ("rank-stopped", (1,), "certain")
    assert "suspended (pid 4242)" in finding.summary
    assert "kill -CONT 4242" in finding.next_step
    assert "rank-stopped" in found(run.view(later=9, processes=stopped)), "the kernel's word needs no minute"
    assert found(run.view(later=5, processes=stopped)) == {}, "suspended for a moment is allowed"
    everybody = {rank: ProcessState(4242, alive=True, state="T") for rank in (0, 1)}
    assert found(run.view(later=50, processes=everybody)) == {}, "a job that is suspended as a whole is so on purpose"


def test_stopped_inside_a_collective_is_still_the_cause(training):
    run = training(2)
    for rank in run.ranks:
        rank.collective(wait=True)
    stopped = {1: ProcessState(4242, alive=True, state="T")}
    assert list(found(run.view(later=61, processes=stopped))) == ["rank-stopped"]


def test_gil_held(training):
    run = training(2)
    run.rank(0).collective(wait=True)
    run.rank(1).phase("forward")
    view = captured(run.view(later=61), rank_0="", rank_1=("held", stack("/me/native.py:5 call")))
    (finding,) = found(view).values()
    assert (finding.code, finding.ranks) == ("gil-held", (1,))
    assert "at /me/native.py:5 in call" in finding.summary
    assert view.capture is not None
    view.capture.ranks[1] = replace(view.capture.ranks[1], waits_for="the file /data/x.pt to open")
    (finding,) = found(view).values()
    assert "at /me/native.py:5 in call, where it waits for the file /data/x.pt to open: its native" in finding.summary


def test_gil_held_before_the_rank_moved_on_is_history(training):
    run = training(2)
    view = captured(run.view(later=61), rank_1=("held", ""))
    run.rank(1).advance(100).step()
    later = run.view(later=61)
    later.capture = view.capture
    assert later.capture is not None
    object.__setattr__(later.capture, "taken_ns", 1)
    assert found(later) == {}


def test_network_stalled(training):
    run = training(3)
    for rank in run.ranks:
        rank.collective(wait=True)
    (finding,) = found(run.view(later=61)).values()
    assert (finding.code, finding.ranks, finding.group) == ("network-stalled", (0, 1, 2), "default")
    assert found(run.view(later=59)) == {}


def test_a_pipeline_names_the_stage_that_does_not_send(training):
    """3 waits for 2, 2 waits for 1, 1 computes: ranks that wait for a waiting rank accuse nobody."""
    from dtobs.events import Kind

    run = training(4)
    world = run.group()
    for rank, peer in ((3, 2), (2, 1)):
        one = run.rank(rank).phase("forward")
        one.event(Kind.P2P, group=world, seq=100 + rank, value=peer)
        one.event(Kind.WAIT_BEGIN, group=world, seq=100 + rank).page(wait_since_ns=one.clock_ns)
    run.rank(0).collective(wait=True)
    run.rank(1).phase("forward")
    view = captured(run.view(later=61), rank_1=stack("/me/model.py:8 attention"))
    (finding,) = found(view).values()
    assert (finding.code, finding.ranks) == ("rank-not-joined", (1,))
    assert "/me/model.py:8" in finding.summary


def test_subgroups_accuse_the_root_only(training):
    """Rank 3 is away; 2 waits for 3 in one group, 0 and 1 wait for 2 in another."""
    run = training(4)
    last = run.group("last", (2, 3))
    first = run.group("first", (0, 1, 2))
    for rank in (0, 1):
        run.rank(rank).collective("all_gather", first, wait=True)
    run.rank(2).collective("all_reduce", last, wait=True)
    run.rank(3).phase("optimizer")
    (finding,) = found(run.view(later=61)).values()
    assert (finding.code, finding.ranks, finding.group) == ("rank-not-joined", (3,), "last")


def test_rank_blocked_unseen_by_the_hooks_is_seen_in_its_stack(training):
    run = training(3)
    run.rank(0).collective(wait=True)
    run.rank(1).collective()
    run.rank(2).phase("forward")
    in_wait = stack("/x/site-packages/torch/distributed/distributed_c10d.py:90 barrier", "/me/train.py:4 main")
    view = captured(run.view(later=61), rank_1=in_wait, rank_2=stack("/me/train.py:7 main"))
    (finding,) = found(view).values()
    assert finding.ranks == (2,)
    assert "ranks 0 and 1 have waited" in finding.summary


def test_recording_of_collectives_that_failed_on_one_rank_accuses_nobody(training):
    run = training(2)
    run.rank(1).meta("probe", name="collectives", state="failed", reason="x")
    run.rank(0).collective(wait=True)
    assert found(run.view(later=61)) == {}


def test_a_group_made_again_is_compared_anew(training):
    run = training(2)
    for rank in run.ranks:
        rank.collective("broadcast", seq=1)
    assert found(run.view()) == {}
    run.rank(0).collective("all_gather", seq=1)
    assert found(run.view()) == {}, "rank 1 has not made the group again yet"


def test_call_site_of_the_waiting_rank_is_in_the_evidence(training):
    run = training(2)
    run.rank(0).collective(site=Site("a.py", 5, "f"), wait=True)
    run.rank(1).phase("forward")
    waiting = next(e for e in found(run.view(later=61))["rank-not-joined"].evidence if e["what"] == "waiting")
    assert (waiting["rank"], waiting["site"]) == (0, "a.py:5 in f")


def test_a_circle_across_groups(training):
    """0 waits for 1 in one group, 1 for 2 in another, 2 for 0 in a third; 3 waits for 0 and is in no circle."""
    run = training(4)
    one, two, three = run.group("one", (0, 1)), run.group("two", (1, 2)), run.group("three", (0, 2, 3))
    for rank, group in ((0, one), (1, two), (2, three), (3, three)):
        run.rank(rank).collective("all_reduce", group, wait=True)
    (finding,) = found(run.view(later=61)).values()
    assert (finding.code, finding.ranks) == ("group-deadlock", (0, 1, 2))
    assert (
        "rank 0 in all_reduce(sum, float32[1024]) #1 of group one at train.py:20 in train_step for rank 1; rank 1 in "
        in finding.summary
    )
    assert found(run.view(later=50)) == {}


@pytest.mark.parametrize(
    ("ways", "said"),
    [
        ({3: "G", 0: "rC", 1: "rC", 2: "R"}, "none of the others in its group has made the call that rank 3 waits in"),
        ({3: "R", 0: "bR", 1: "B", 2: "B"}, "rank 3 alone left out or put off the call in which the others wait"),
        ({3: "R", 0: "B", 1: "B", 2: "B"}, ""),  # rank 2 may be the one that is early
    ],
)
def test_the_one_rank_that_makes_or_leaves_out_a_call_of_all(training, ways: dict[int, str], said: str):
    """Two rows and two columns: a gather or a broadcast of all, and calls of row and column; upper case waits."""
    run = training(4)
    for number, way in ways.items():
        groups = {"r": (number // 2 * 2, number // 2 * 2 + 1), "c": (number % 2, number % 2 + 2), "g": (0, 1, 2, 3)}
        for letter in way:
            kind = letter.lower()
            op = {"g": "all_gather", "b": "broadcast"}.get(kind, "all_reduce")
            group = run.group(f"{kind}{groups[kind]}", groups[kind]) if kind in "rc" else None
            run.rank(number).collective(op, group, wait=letter.isupper())
    (finding,) = found(run.view(later=61)).values()
    assert finding.code == "group-deadlock"
    assert (finding.ranks, finding.confidence) == (((3,), "likely") if said else ((2, 3), "certain"))
    assert finding.summary.endswith(said)


@pytest.mark.parametrize(("world", "named"), [(3, (1,)), (2, (0, 1))])
def test_the_one_rank_that_left_out_a_call_of_another_group(training, world: int, named: tuple[int, ...]):
    """All but rank 1 gather metrics in a group of their own; it goes on to the next call of the first group."""
    run = training(world)
    metrics = run.group("metrics", tuple(range(world)))
    for step in range(6):
        for rank in run.ranks:
            rank.collective("all_reduce")
            if step % 2:
                rank.collective("all_reduce", metrics)
    for rank in run.ranks:
        rank.collective("all_reduce")
        rank.collective("all_reduce", *(() if rank.number == 1 else (metrics,)), wait=True)
    (finding,) = found(run.view(later=61)).values()
    assert (finding.code, finding.ranks) == ("group-deadlock", named)
    assert (finding.confidence == "likely") is (world > 2)
    assert finding.summary.endswith("left out or put off the call in which the others wait") is (world > 2)


def test_waits_of_a_device_that_no_host_sees(training):
    """On a GPU nothing blocks in the collective itself: who has issued it tells."""
    run = training(3)
    for rank in (0, 2):
        run.rank(rank).phase("backward").collective()
    run.rank(1).phase("forward")
    view = captured(run.view(later=61), rank_0=stack("/me/train.py:50 log_loss"), rank_1=stack("/me/model.py:3 f"))
    (finding,) = found(view).values()
    assert (finding.code, finding.ranks) == ("rank-not-joined", (1,))
    assert "ranks 0 and 2 have waited 61 s" in finding.summary
    assert found(run.view(later=50)) == {}


def test_a_loader_that_blocks_while_devices_wait(training):
    run = training(2)
    run.rank(0).phase("backward").collective()
    run.rank(1).phase("data")
    (finding,) = found(run.view(later=61)).values()
    assert (finding.code, finding.ranks) == ("stuck-in-dataloader", (1,))
    assert "rank 0 has waited 61 s" in finding.summary
