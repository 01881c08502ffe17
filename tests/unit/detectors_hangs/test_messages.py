"""Sends and receives without their other half, links that lose what was sent, devices that stop."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtobs.diagnose import diagnose
from dtobs.diagnose.gather import Evidence
from dtobs.events import Kind, identify, message_number
from dtobs.host.kernel_log import XID_NOTE
from dtobs.recording.meta import Op
from dtobs.recording.ring import EVENT_CAPACITY
from dtobs.recording.view import RunView
from dtobs.testing.fake_run import FakeRank, FakeRun
from dtobs.testing.layout import JobLayout
from dtobs.testing.simulate import SimulatedFault
from dtobs.testing.synthetic_dumps import SimulatedJob, dumps_of
from tests.unit.detectors_hangs.test_crashes import GLOO_CLOSED, fails, gone
from tests.unit.detectors_hangs.trouble import captured, found, stack


def message(rank: FakeRank, op: str, peer: int, number: int, *, wait: bool = False, tag: int = 0) -> None:
    """Issue the `number`-th send or receive of a pair in group default, and wait for it for ever."""
    what = Op(op, "", ((3,),), ("float32",))
    op_id, group, seq = identify(str(what)), rank.run.group(), message_number(number, tag)
    rank.meta("op", id=op_id, op=op, shapes=what.shapes, dtypes=what.dtypes)
    rank.event(Kind.P2P, group=group, seq=seq, op=op_id, value=peer)
    if wait:
        rank.event(Kind.WAIT_BEGIN, group=group, seq=seq).page(wait_since_ns=rank.clock_ns)


def test_a_receive_that_nobody_sends_for_names_both_and_the_counts(training):
    run = training(2)
    message(run.rank(0), "send", 1, 1)
    message(run.rank(1), "recv", 0, 1)
    message(run.rank(1), "recv", 0, 2, wait=True)
    run.rank(0).collective("barrier", wait=True)
    (finding,) = found(run.view(later=61)).values()
    assert (finding.code, finding.ranks, finding.confidence) == ("p2p-unmatched", (0, 1), "certain")
    assert "rank 1 waits to receive float32[3] #2 from rank 0" in finding.summary
    assert "while rank 0 waits in " in finding.summary
    assert finding.summary.endswith("rank 1 asked for 2 messages from rank 0, which sent 1")
    assert found(run.view(later=50)) == {}


def tagged(run: FakeRun, sent: list[int], asked: list[int]) -> RunView:
    """Rank 0 sends rank 1 messages with these tags, and each waits for its last one."""
    for rank, op, tags in ((0, "send", sent), (1, "recv", asked)):
        for number, tag in enumerate(tags, 1):
            message(run.rank(rank), op, 1 - rank, number, tag=tag, wait=number == len(tags))
    return run.view(later=61)


def test_a_message_with_another_tag_is_not_the_one_that_is_waited_for(training):
    (finding,) = found(tagged(training(2), [5, 6, 9], [6, 5, 7])).values()
    assert (finding.code, finding.ranks, finding.confidence) == ("p2p-unmatched", (0, 1), "certain")
    assert "rank 0 waits to send float32[3] #3 to rank 1" in finding.summary
    assert finding.summary.endswith("rank 0 sends a message with tag 9, and rank 1 asked for one with tag 7")


def test_tags_of_messages_that_cross_are_no_sign(training):
    (finding,) = found(tagged(training(2), [5, 6, 7, 8], [6, 5, 8, 7])).values()
    assert finding.code == "network-stalled"


def test_what_is_not_held_any_more_is_no_other_tag(training):
    """The oldest message that both hold may be one of several that crossed."""
    run = training(2)
    for rank in (0, 1):
        for _ in range(EVENT_CAPACITY - 60):
            run.rank(rank).event(Kind.WAIT_END)
    sent = [tag for step in range(40) for tag in (2 * step, 2 * step + 1)]
    asked = [tag for step in range(40) for tag in (2 * step + 1, 2 * step)]
    view = tagged(run, sent, asked)
    assert 1 < view.events(1)["seq"][view.events(1)["kind"] == Kind.P2P].min() & 0xFFFF < 80
    (finding,) = found(view).values()
    assert finding.code == "network-stalled"


@pytest.mark.parametrize(("sent", "left"), [(2, (1,)), (3, (0, 1))])
def test_who_left_out_a_message_that_is_missed_only_when_all_others_have_ended(tmp_path, sent, left):
    run = FakeRun(tmp_path, 3)
    for number, peer_sent in ((0, 3), (1, sent)):
        for seq in range(1, 4):
            message(run.rank(2), "recv", number, seq)
        for seq in range(1, peer_sent + 1):
            message(run.rank(number), "send", 2, seq)
        run.rank(number).close()
    fails(run.rank(2), "RuntimeError", GLOO_CLOSED)
    (finding,) = found(run.view(later=1, processes={0: gone(0), 1: gone(0), 2: gone(1)})).values()
    assert (finding.code, finding.ranks) == ("rank-exited-early", left)
    assert finding.summary.endswith(": rank 2 asked for 3 messages from rank 1, which sent 2") == (left == (1,))
    assert ("left out a message" in finding.next_step) == (left == (1,))


def test_two_sends_that_wait_for_each_other(training):
    run = training(2)
    for rank in (0, 1):
        message(run.rank(rank), "send", 1 - rank, 1, wait=True)
    pictures = diagnose(Evidence("x", run.view(later=61))).pictures
    assert pictures.waits is not None
    assert {node.text for node in pictures.waits.nodes} == {"send(float32[3]) #1"}
    (finding,) = found(run.view(later=61)).values()
    assert (finding.code, finding.ranks) == ("p2p-unmatched", (0, 1))
    assert "rank 0 sent 1 message to rank 1, which asked for 0" in finding.summary


def test_receives_in_which_hosts_are_caught(training):
    """NCCL connects to a peer inside the call, and the page says of no wait: as seen on an H100, of two receives."""
    run = training(2)
    for rank in (0, 1):
        message(run.rank(rank), "recv", 1 - rank, 1)
    inside = (
        "Thread 0x1 (most recent call first):\n"
        '  File "/me/torch/distributed/distributed_c10d.py", line 2597 in irecv\n'
        '  File "/me/train.py", line 7 in <module>\n'
    )
    (finding,) = found(captured(run.view(later=61), rank_0=inside, rank_1=inside)).values()
    assert (finding.code, finding.ranks) == ("p2p-unmatched", (0, 1))
    assert "to receive float32[3] #1 from rank" in finding.summary


def test_a_host_that_ran_on_until_its_device_took_no_more(training):
    """As seen on an H100: a receive that nobody answers, and the host is caught where it launches something later."""
    run = training(2)
    message(run.rank(0), "recv", 1, 1)
    message(run.rank(1), "recv", 0, 1, wait=True)
    launching = 'Thread 0x1 (most recent call first):\n  File "/me/train.py", line 12 in <module>\n'
    view = captured(run.view(later=61), rank_0=launching, rank_1="")
    assert view.capture is not None
    done = {"profiling_name": "nccl:all_reduce", "state": "completed"}
    undone = [{"profiling_name": f"nccl:{call}", "state": "scheduled"} for call in ("recv 0<-1", "all_reduce")]
    dump = {"entries": [done, *undone]}
    view.capture.ranks[0] = replace(view.capture.ranks[0], flight_recorder=dump)
    (finding,) = found(view).values()
    assert (finding.code, finding.ranks) == ("rank-not-joined", (0,))
    assert finding.summary.endswith("; its device has not done nccl:recv 0<-1 and 1 later call")
    assert "sends and receives" in finding.next_step


@pytest.mark.parametrize(("backend", "codes"), [("nccl", ["rank-not-joined"]), ("gloo", [])])
def test_hosts_that_ran_on_behind_messages_that_one_rank_has_not_answered(training, backend, codes):
    """As seen on an H200, of a pipeline: no host waits, the culprit sleeps, and nobody issued a collective."""
    run = training(3)
    for rank in run.ranks:
        rank.meta("group", id=run.group(), name="default", ranks=[0, 1, 2], backend=backend)
    message(run.rank(1), "recv", 0, 1)
    for seq in (1, 2):
        message(run.rank(0), "send", 1, seq)
        message(run.rank(2), "recv", 1, seq)
    message(run.rank(1), "send", 2, 1)
    launching = stack("/me/torch/optim/adam.py:9 _multi_tensor_adam", "/me/train.py:12 <module>")
    sleeping = stack("/me/train.py:7 <module>")
    view = captured(run.view(later=61), rank_0=launching, rank_1=sleeping, rank_2=launching)
    findings = found(view)
    assert list(findings) == codes
    if codes:
        assert findings["rank-not-joined"].ranks == (1,)
        assert "rank 1 is at /me/train.py:7" in findings["rank-not-joined"].summary
        assert "ranks 0 and 2 have waited 63 s" in findings["rank-not-joined"].summary


@pytest.mark.parametrize(("state", "codes"), [("scheduled", ["network-stalled"]), ("completed", [])])
def test_a_call_that_devices_have_not_done_while_no_host_waits(training, state, codes):
    """Each host has issued it and needs a result: where that is, it only sleeps. NCCL's recorder knows."""
    run = training(2)
    for rank in run.ranks:
        rank.collective()
        rank.meta("group", id=run.group(), name="default", ranks=[0, 1], backend="nccl")
    view = captured(run.view(later=61), rank_0="", rank_1="")
    assert view.capture is not None
    entry = {"profiling_name": "nccl:all_reduce", "state": state, "process_group": ["0", "default_pg"]}
    for rank in (0, 1):
        dump = {"entries": [entry], "version": "2.10"}
        view.capture.ranks[rank] = replace(view.capture.ranks[rank], flight_recorder=dump)
    findings = found(view)
    assert list(findings) == codes
    if codes:
        assert "all issued all_reduce(sum, float32[1024]) #21" in findings["network-stalled"].summary
        assert findings["network-stalled"].summary.endswith("only TORCH_NCCL_ENABLE_TIMING=1 would tell")


def test_a_message_that_was_sent_and_does_not_arrive_is_the_networks(training):
    run = training(2)
    message(run.rank(0), "send", 1, 1)
    for rank in (0, 1):  # rank 1 would answer, and has not got what to answer to
        message(run.rank(rank), "recv", 1 - rank, 1, wait=True)
    (finding,) = found(run.view(later=61)).values()
    assert (finding.code, finding.ranks) == ("network-stalled", (0, 1))
    assert "rank 1 has waited 61 s to receive float32[3] #1 from rank 0" in finding.summary
    assert "rank 0 issued its half, and it does not arrive" in finding.summary


def test_a_link_that_fails_in_one_direction(training):
    """Rank 2 does not get the result that the others have: they wait in the next call, for rank 2."""
    run = training(3)
    for rank in run.ranks:
        rank.collective(wait=True)
    for rank in (0, 1):
        run.rank(rank).collective(wait=True)
    (finding,) = found(run.view(later=61)).values()
    assert (finding.code, finding.ranks) == ("network-stalled", (2,))
    assert "all 3 ranks issued all_reduce(sum, float32[1024]) #21 of group default" in finding.summary
    assert "ranks 0 and 1 completed it" in finding.summary


def stalled_on_devices(training, notes: dict[int, str]) -> RunView:
    run = training(2)
    for rank in run.ranks:
        rank.collective(wait=True)
    view = captured(run.view(later=61), rank_0="", rank_1="")
    assert view.capture is not None
    for rank, note in notes.items():
        view.capture.ranks[rank] = replace(view.capture.ranks[rank], notes=(note,))
    return view


def test_a_device_error_in_the_kernel_log_explains_a_stall(training):
    view = stalled_on_devices(training, {1: f"{XID_NOTE}Xid 79 of device 0000:3b:00: GPU has fallen off the bus."})
    (finding,) = found(view).values()
    assert (finding.code, finding.ranks) == ("device-stopped", (1,))
    assert "the kernel logged Xid 79 of device 0000:3b:00: GPU has fallen off the bus." in finding.summary


def test_other_notes_of_a_capture_are_no_device_errors(training):
    assert list(found(stalled_on_devices(training, {1: "fr_trace_json: no answer in time"}))) == ["network-stalled"]


@pytest.mark.parametrize(("backend", "codes"), [("nccl", ["device-stopped"]), ("gloo", ["network-stalled"])])
def test_the_flight_recorder_of_the_capture_says_whose_device_is_behind(tmp_path, backend, codes):
    """The hosts have all issued the same: with NCCL the recorders know; those of Gloo do not say when a call ended."""
    run = FakeRun(tmp_path / "run", 4)
    for _ in range(4):
        for rank in run.ranks:
            rank.step().collective()
    for rank in run.ranks:
        rank.collective(wait=True)
        rank.meta("group", id=run.group(), name="default", ranks=[0, 1, 2, 3], backend=backend)
    view = captured(run.view(later=61), rank_0="", rank_1="", rank_2="", rank_3="")
    assert view.capture is not None
    job = SimulatedJob(JobLayout(dp=4, tp=1, pp=1), SimulatedFault("device-stopped", 2), entries=200, steps=6)
    for rank, dump in dumps_of(job):
        view.capture.ranks[rank] = replace(view.capture.ranks[rank], flight_recorder=dump)
    findings = found(view)
    assert list(findings) == codes
    if backend == "nccl":
        assert findings["device-stopped"].ranks == (2,)


def test_a_peer_of_which_nothing_is_recorded_is_named_as_possible_only(tmp_path):
    """An actor without an optimizer, under `dtobs run`: the learner waits for it, and who is at fault is not known."""
    run = FakeRun(tmp_path / "run", 3)
    for _ in range(20):
        run.rank(0).step()
    message(run.rank(0), "recv", 2, 1, wait=True)
    (finding,) = found(run.view(later=61)).values()
    assert (finding.code, finding.ranks, finding.confidence) == ("rank-not-joined", (2,), "possible")
    assert "rank 0 has waited 61 s to receive float32[3] #1 from rank 2" in finding.summary
    assert "nothing is recorded of rank 2, so that who holds it up cannot be told" in finding.summary
    early = diagnose(Evidence("x", run.view(later=30)))  # before the threshold it is a note, and no traceback
    assert early.verdict is None or early.verdict.confidence == "possible"
    assert found(run.view(later=1)) == {}
