"""What counts as the same call, and what a dump's own oddities must not be taken for."""

from __future__ import annotations

import pytest

from dtobs.findings import Confidence
from dtobs.flight_recorder import analyse_dumps, dumps_from_objects
from tests.unit.flight_recorder.builders import BASE_NS, call, dump, gloo

TWO = {"0": [0, 1]}
THREE = {"0": [0, 1, 2]}


def findings(*dumps, taken_ns=None):
    return analyse_dumps(dumps_from_objects(dict(enumerate(dumps)), taken_ns)).findings


def codes(*dumps, **more):
    return [(f.code, f.ranks) for f in findings(*dumps, **more)]


@pytest.mark.parametrize("prefix", ["nccl:", "gloo:", "c10d:", "nccl2:", "brandnew:", ""])
def test_any_backend(prefix: str):
    waits = dump([call(1, f"{prefix}all_reduce"), call(2, f"{prefix}all_reduce", state="started")], TWO)
    assert codes(waits, dump([call(1, f"{prefix}all_reduce")], TWO)) == [("rank-not-joined", (1,))]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (call(1, sizes=[[2, 3]]), call(1, sizes=[[6]])),
        (call(1, "nccl:_all_gather_base", outputs=[[8]]), call(1, "nccl:all_gather", outputs=[[4], [4]])),
        (call(1, "nccl:gather", outputs=[[4], [4]]), call(1, "nccl:gather", outputs=[])),
        (
            call(1, "nccl:scatter", sizes=[[4], [4]], outputs=[[4]]),
            call(1, "nccl:scatter", sizes=[], outputs=[[4]]),
        ),
        (call(1, "nccl:all_to_all", sizes=[[3], [5]]), call(1, "nccl:all_to_all", sizes=[[5], [2]])),
        (call(1, "nccl:barrier", sizes=[]), call(1, "nccl:all_reduce_barrier", sizes=[[1]])),
        (call(1, "new:thing", sizes=[[3]]), call(1, "new:thing", sizes=[[5]])),
        (call(1, site="main"), call(1, site="rank_zero")),
    ],
    ids=["reshaped", "spelling", "gather", "scatter", "uneven", "barrier", "unknown", "site"],
)
def test_calls_that_fit_together(one, other):
    assert codes(dump([one], TWO), dump([other], TWO)) == []


@pytest.mark.parametrize(("taken", "code"), [((5, 3), "network-stalled"), ((5, 4), "shape-mismatch")])
def test_an_all_to_all_takes_what_is_sent(taken: tuple[int, int], code: str):
    ranks = [
        dump([call(1, "nccl:all_to_all", sizes=[[sent, 6]], outputs=[[rows, 6]], state="started", site="moe")], TWO)
        for sent, rows in zip((8, 0), taken, strict=True)
    ]
    (found,) = findings(*ranks)
    assert (found.code, found.ranks) == (code, ())
    if code == "shape-mismatch":
        assert found.confidence is Confidence.LIKELY
        assert found.summary.endswith(": its ranks send 48 elements in all, and take 54")
    assert codes(ranks[0], dump([call(1, "nccl:all_to_all", sizes=[[4, 6]], outputs=[[9, 6]])], TWO)) != [(code, ())]


def test_rank_zero_that_always_calls_from_a_line_of_its_own():
    others = dump([call(n, site="train" if n % 3 else "save") for n in range(1, 40)], THREE)
    zero = dump([call(n, site="train" if n % 3 else "save_main") for n in range(1, 40)], THREE)
    assert codes(zero, others, others) == []


def test_lines_tell_since_when_a_rank_has_gone_another_way():
    """Rank 1 evaluates while its peers train: its calls fit for a while."""
    lines = {0: "aabbc", 1: "aaeea", 2: "aabbc"}
    dumps = {
        rank: dump([call(n, site=line, sizes=[[8 if line == "a" and n == 5 else 4]]) for n, line in enumerate(of, 1)])
        for rank, of in lines.items()
    }
    (found,) = analyse_dumps(dumps_from_objects(dumps)).findings
    assert (found.code, found.ranks) == ("shape-mismatch", (1,))
    assert "; rank 1 had gone another way since #3, which came from /app/e.py:7 in step there" in found.summary


def test_the_one_rank_that_left_out_a_call_of_another_group():
    groups = {"0": [0, 1, 2], "1": [0, 1, 2]}
    metrics = {"group": "1", "description": "metrics"}
    before = []
    for step in range(1, 11):  # metrics in every second step
        before += [call(step), *([] if step % 2 else [call(step // 2, **metrics)])]
    others = [*before, call(11), call(12), call(6, state="scheduled", **metrics)]
    odd = [*before, call(11), call(12), call(13, state="scheduled")]
    dumps = {rank: dump(odd if rank == 1 else others, groups) for rank in range(3)}
    (found,) = analyse_dumps(dumps_from_objects(dumps)).findings
    assert (found.code, found.ranks) == ("group-deadlock", (1,))
    assert found.summary.endswith("rank 1 alone left out or put off the call in which the others wait")


def test_one_call_fewer():
    sites = ["a", "b", "c", "d", "e"] * 4
    usual = dump([call(n, site=s) for n, s in enumerate(sites, 1)], THREE)
    left_out = dump([call(n, site=s) for n, s in enumerate(sites[:7] + sites[8:], 1)], THREE)
    (finding,) = findings(usual, left_out, usual)
    assert (finding.code, finding.ranks) == ("call-site-mismatch", (1,))
    assert "made one call fewer than its peers" in finding.summary


def test_gloo_group_table_is_repaired():
    """The world from its description, another group from who issued in it, its true size from an all-gather."""
    pair = {"group": "1", "description": "undefined"}
    zero = dump([gloo(1), gloo(1, **pair), gloo(2, done=False)])
    one = dump([gloo(1), gloo(1, **pair), gloo(2, done=False)])
    two = dump([gloo(1)])
    (finding,) = findings(zero, one, two)
    assert (finding.code, finding.ranks, finding.confidence) == ("rank-not-joined", (2,), Confidence.LIKELY)


def test_gloo_last_rank_without_a_dump_is_not_taken_for_a_stalled_network():
    gathers = gloo(1, "all_gather", sizes=[[4]], outputs=[[3, 4]])
    found = findings(*(dump([gathers, gloo(2, done=False)]) for _ in range(2)))
    assert [(f.code, f.ranks) for f in found] == [("dumps-missing", ())]


def test_gloo_that_is_late_to_note_an_end_has_no_stopped_device():
    late = dump([gloo(1), gloo(2, "barrier", done=False, sizes=[]), gloo(3, done=False)])
    others = dump([gloo(1), gloo(2, "barrier", sizes=[]), gloo(3, done=False)])
    assert codes(late, others, others, dump([gloo(1), gloo(2, "barrier", sizes=[])])) == [("rank-not-joined", (3,))]


def test_gloo_sends_that_are_only_counted_make_an_accusation_possible_only():
    waits = dump([gloo(1), gloo(2, done=False)])
    sends = dump([{**gloo(1), "pg_id": 0, "op_id": 1}], pg_status={"0": {"last_enqueued_collective": 2}})
    (finding,) = findings(waits, sends)
    assert (finding.code, finding.ranks, finding.confidence) == ("rank-not-joined", (1,), Confidence.POSSIBLE)
    assert "it has sent or received since, which this backend does not record" in finding.summary


def test_batched_sends_that_use_up_collective_numbers():
    """Older PyTorch: rank 1 took part in two batches, so its numbers of the group run ahead of rank 0's."""

    def batch(seq: int, name: str) -> list[dict]:
        return [
            call(seq, f"nccl:{name}", state="scheduled", p2p=True),
            call(seq, "nccl:coalesced", sizes=[], p2p=False),
        ]

    zero = dump([call(1), *batch(2, "send 0->1"), call(3), call(4)], THREE)
    one = dump([call(1), *batch(2, "recv 1<-0"), *batch(3, "send 1->2"), call(4), call(5)], THREE)
    two = dump([call(1), *batch(2, "recv 2<-1"), call(3), call(4)], THREE)
    assert codes(zero, one, two) == []
    wrapped = {**one, "entries": one["entries"][1:]}
    analysis = analyse_dumps(dumps_from_objects({0: zero, 1: wrapped, 2: two}))
    assert analysis.findings == ()
    assert "numbers this PyTorch lets drift apart" in analysis.notes[0]


def test_parts_of_a_coalesced_call_share_its_state():
    """The recorder never moves the parts on; only the entry that closes them is completed."""
    parts = [call(1, state="scheduled", sizes=[[n]]) for n in (3, 5)] + [call(1, "nccl:coalesced", sizes=[])]
    assert codes(dump(parts, TWO), dump(parts, TWO)) == []
    other = [call(1, state="scheduled", sizes=[[n]]) for n in (3, 6)] + [call(1, "nccl:coalesced", sizes=[])]
    assert codes(dump(parts, THREE), dump(parts, THREE), dump(other, THREE)) == [("shape-mismatch", (2,))]


def test_sizes_of_a_send_and_its_receive_differ():
    zero = dump([call(0, "nccl:send 0->1", sizes=[[4]], state="started", p2p=True)], TWO)
    one = dump([call(0, "nccl:recv 1<-0", sizes=[[8]], state="started", p2p=True)], TWO)
    found = findings(zero, one)
    assert [(f.code, f.ranks, f.confidence) for f in found] == [("p2p-unmatched", (0, 1), Confidence.CERTAIN)]


def test_both_sides_send_first():
    zero = dump([call(0, "nccl:send 0->1", state="started", p2p=True)], TWO)
    one = dump([call(0, "nccl:send 1->0", state="started", p2p=True)], TWO)
    assert codes(zero, one) == [("p2p-unmatched", (0, 1))]


def test_group_whose_ranks_are_not_in_order():
    """`new_group([2, 0], sort_ranks=False)`: its rank 0 is rank 2 of the job, which never sends."""
    idle = dump([call(1)], THREE)
    waits = dump([call(1), call(0, "nccl:recv 1<-0", group="s", state="started", p2p=True)], {"s": [2, 0]} | THREE)
    peer = dump([call(1)], {"s": [2, 0]} | THREE)
    (finding,) = findings(waits, idle, peer)
    assert (finding.code, finding.ranks) == ("rank-not-joined", (2,))
    assert "its half of recv [4] Float (rank 2 to rank 0), in which rank 0 waits" in finding.summary


def test_receive_that_the_sender_went_past():
    """Rank 0 waits for what rank 1 never sent, while both went on to the next collective."""
    zero = dump([call(0, "nccl:recv 0<-1", state="started", p2p=True), call(1)], TWO)
    one = dump([call(1)], TWO)
    (finding,) = findings(zero, one)
    assert (finding.code, finding.ranks) == ("p2p-unmatched", (0, 1))
    assert "rank 1 went past it without its half" in finding.summary


def _forgotten_send(rank: int, forgets: int, done: bool) -> dict:
    """Steps of an exchange with both neighbours of three and a collective; in the last, one leaves out a send."""
    left, right = (rank - 1) % 3, (rank + 1) % 3
    halves = [
        f"send {rank}->{right}",
        f"recv {rank}<-{left}",
        f"send {rank}->{left}",
        f"recv {rank}<-{right}",
    ]
    entries = []
    for step in range(4):
        last = step == 3
        state = "completed" if done or not last else "scheduled"
        chosen = halves[1:] if last and rank == forgets else halves
        entries += [call(step, f"nccl:{half}", state="scheduled", p2p=True) for half in chosen]
        entries.append(call(step, "nccl:coalesced", sizes=[], state=state))
        if not last or done:
            entries.append(call(step + 1, state="scheduled" if last else "completed"))
    return dump(entries, THREE)


@pytest.mark.parametrize("lost", [0, 3, 8])
def test_send_that_a_batch_forgot(lost: int):
    """Rank 0 sends nothing to rank 1, which waits for that alone: all its other transfers are done."""
    dumps = [_forgotten_send(rank, forgets=0, done=rank != 1) for rank in range(3)]
    cut = [d | {"entries": d["entries"][lost:]} for d in dumps]
    (finding,) = findings(*cut)
    assert (finding.code, finding.ranks) == ("p2p-unmatched", (0, 1))
    assert "rank 1 waits in recv [4] Float (rank 0 to rank 1)" in finding.summary


@pytest.mark.parametrize("lost", [0, 3, 8])
def test_batch_that_one_rank_completed_before_its_peers(lost: int):
    """Dumps of a moment: no half is without the other."""
    dumps = [_forgotten_send(rank, forgets=-1, done=rank == 0) for rank in range(3)]
    cut = [d | {"entries": d["entries"][lost:]} for d in dumps]
    assert {(f.code, f.ranks, f.confidence) for f in findings(*cut)} == {("network-stalled", (), Confidence.POSSIBLE)}


def test_same_name_for_groups_of_different_ranks():
    """Groups made by a part of the ranks may share a name."""
    left = [dump([call(1, group="g", sizes=[[4]])], {"g": [0, 1]}) for _ in range(2)]
    right = [dump([call(1, group="g", sizes=[[9]])], {"g": [2, 3]}) for _ in range(2)]
    assert codes(*left, *right) == []


class TestDumpsOfAJobInMotion:
    def test_nothing_has_waited_long(self):
        waits = dump([call(1), call(2, state="started")], TWO)
        late = dump([call(1)], TWO)
        taken = BASE_NS + 2 * 10**6 + 10**9
        analysis = analyse_dumps(dumps_from_objects({0: waits, 1: late}, {0: taken, 1: taken}))
        assert analysis.findings == ()
        assert "nothing in them had waited longer than 1 s" in analysis.notes[0]
        hours = taken + 3600 * 10**9
        assert codes(waits, late, taken_ns={0: hours, 1: hours}) == [("rank-not-joined", (1,))]

    def test_a_rank_completed_what_another_had_not_issued(self):
        early = dump([call(1), call(2, state="started")], TWO)
        later = dump([call(n) for n in range(1, 9)], TWO)
        analysis = analyse_dumps(dumps_from_objects({0: early, 1: later}))
        assert analysis.findings == ()
        assert "older than what the other ranks had completed" in analysis.notes[0]

    def test_a_clock_that_is_ahead_proves_nothing(self):
        ahead = BASE_NS + 10**13
        waits = dump([call(1), call(2, state="started", at_ns=ahead)], TWO)
        taken = {0: BASE_NS + 10**12, 1: BASE_NS + 10**12}
        assert codes(waits, dump([call(1)], TWO), taken_ns=taken) == [("rank-not-joined", (1,))]


def test_a_dump_without_entries():
    waits = dump([call(1, state="started")], TWO)
    (finding,) = findings(waits, dump([], TWO))
    assert (finding.code, finding.ranks) == ("rank-not-joined", (1,))
    assert "its dump holds no call at all" in finding.summary
    assert codes(dump([], TWO), dump([], TWO)) == []


def test_older_and_newer_schemas():
    old = [{k: v for k, v in call(n).items() if k not in ("is_p2p", "retired")} for n in (1, 2)]
    new = [{**call(n), "unheard_of": [1]} for n in (1, 2)]
    assert codes(dump(old, TWO, version="2.0"), dump(new, TWO, version="9.7", also_new={})) == []
