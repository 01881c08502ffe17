"""Stacks of ranks, compared: the odd one is named, a healthy moment is not."""

from __future__ import annotations

import pytest

from dtobs.findings import Confidence
from dtobs.host.stacks import Frame
from dtobs.stacks import Doing, RankStack, judge, standing

TORCH = "/usr/lib/python3.11/site-packages/torch"
C10D = f"{TORCH}/distributed/distributed_c10d.py"
WRAPPER = Frame(f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper")
STEP = Frame("/home/me/train.py", 40, "step")
MAIN = Frame("/home/me/train.py", 90, "<module>")


def call(name: str, user: Frame = STEP) -> tuple[Frame, ...]:
    return (Frame(C10D, 2501, name), WRAPPER, user, MAIN)


REDUCE = call("all_reduce")
BACKWARD = (
    Frame(f"{TORCH}/autograd/graph.py", 800, "_engine_run_backward"),
    Frame(f"{TORCH}/autograd/__init__.py", 347, "backward"),
    Frame(f"{TORCH}/_tensor.py", 600, "Tensor.backward"),
    STEP,
)
LOADING = (
    Frame("/home/me/data.py", 12, "Texts.__getitem__"),
    Frame(f"{TORCH}/utils/data/_utils/fetch.py", 52, "fetch"),
    Frame(f"{TORCH}/utils/data/dataloader.py", 701, "__next__"),
    MAIN,
)
SAVING = (Frame(f"{TORCH}/serialization.py", 900, "save"), Frame("/home/me/train.py", 60, "save"), MAIN)
CODE = (Frame("/usr/lib/python3.11/subprocess.py", 1, "wait"), Frame("/home/me/train.py", 33, "validate"), MAIN)


PIPELINE = (
    Frame(f"{TORCH}/distributed/pipelining/schedules.py", 683, "_wait_batch_p2p"),
    Frame(f"{TORCH}/distributed/pipelining/schedules.py", 1067, "Schedule1F1B._step_microbatches"),
    STEP,
)


def ranks(*frames: tuple[Frame, ...], still: bool | None = True, **more: object) -> list[RankStack]:
    return [RankStack(n, one, still=still, **more) for n, one in enumerate(frames)]


@pytest.mark.parametrize(
    ("frames", "doing", "name"),
    [
        (REDUCE, Doing.COLLECTIVE, "all_reduce"),
        (call("batch_isend_irecv"), Doing.MESSAGE, "batch_isend_irecv"),
        (call("init_process_group", MAIN), Doing.MEETING, "init_process_group"),
        (BACKWARD, Doing.BACKWARD, ""),
        (PIPELINE, Doing.MESSAGE, "a send or a receive of the pipeline"),
        (LOADING, Doing.DATA, ""),
        (SAVING, Doing.CHECKPOINT, ""),
        (CODE, Doing.CODE, ""),
        ((Frame("torch/distributed/distributed_c10d.py", 1, "barrier"), STEP), Doing.COLLECTIVE, "barrier"),
        ((Frame("libc.so.6", 0, "pthread_cond_wait"), *REDUCE), Doing.COLLECTIVE, "all_reduce"),
        ((Frame("sync.cc", 31, "wait"), Frame("python3.12", 0, "call"), *REDUCE), Doing.COLLECTIVE, "all_reduce"),
    ],
)  # fmt: skip
def test_what_a_stack_shows(frames: tuple[Frame, ...], doing: Doing, name: str):
    found = standing(frames)
    assert (found.doing, found.call) == (doing, name)
    assert found.site is not None
    assert found.site.file.rpartition("/")[2] in ("train.py", "data.py")


@pytest.mark.parametrize(
    ("odd", "code"),
    [(LOADING, "stuck-in-dataloader"), (SAVING, "stuck-in-checkpoint"), (CODE, "rank-not-joined")],
)
@pytest.mark.parametrize("world", [2, 4, 64])
def test_rank_elsewhere(odd: tuple[Frame, ...], code: str, world: int):
    frames = [REDUCE] * world
    frames[world - 1] = odd
    findings, notes = judge(ranks(*frames), world)
    assert [(f.code, f.ranks, f.confidence) for f in findings] == [(code, (world - 1,), Confidence.LIKELY)]
    assert "while rank" in findings[0].summary
    assert notes == []


def test_ranks_elsewhere_at_several_lines():
    other = (Frame("/home/me/train.py", 62, "save"), MAIN)
    (found,), _ = judge(ranks(PIPELINE, CODE, other, PIPELINE, CODE), 5)
    assert found.summary == (
        "ranks 1 and 4 are at /home/me/train.py:33 in validate, rank 2 is at /home/me/train.py:62 in save, "
        "while ranks 0 and 3 wait in a send or a receive of the pipeline at /home/me/train.py:40 in step"
    )


def test_one_look_is_only_possible():
    findings, _ = judge(ranks(REDUCE, CODE, still=None), 2)
    assert [(f.code, f.confidence) for f in findings] == [("rank-not-joined", Confidence.POSSIBLE)]


MEETING = call("new_group", MAIN)
SYNC = (Frame(f"{TORCH}/cuda/__init__.py", 900, "synchronize"), STEP)


@pytest.mark.parametrize(
    ("frames", "wanted"),
    [
        ((MEETING, MEETING, CODE, MEETING), [("rank-not-joined", (2,))]),
        ((REDUCE, REDUCE, MEETING, REDUCE), [("rendezvous-incomplete", (2,))]),
        ((MEETING, MEETING, REDUCE, MEETING), [("rendezvous-incomplete", ())]),
        ((BACKWARD, BACKWARD, SYNC, BACKWARD), []),
        ((MEETING,) * 4, []),
    ],
    ids=["no group without it", "another group", "the few may be right", "nobody knows for whom", "all make a group"],
)
def test_groups_that_are_made(frames: tuple[tuple[Frame, ...], ...], wanted: list[tuple[str, tuple[int, ...]]]):
    assert [(found.code, found.ranks) for found in judge(ranks(*frames), 4)[0]] == wanted


def test_rank_that_works_is_not_accused():
    stacks = [RankStack(0, REDUCE, still=True), RankStack(1, CODE, still=False)]
    findings, notes = judge(stacks, 2)
    assert findings == []
    assert notes == [
        "rank 1 is at work, at /home/me/train.py:33 in validate, while rank 0 waits in all_reduce at "
        "/home/me/train.py:40 in step: a long step or a loop that does not end"
    ]


def test_healthy_job_moves():
    assert judge(ranks(REDUCE, BACKWARD, CODE, LOADING, still=False), 4) == (
        [],
        ["every rank moved between the looks: nothing hangs"],
    )


def test_all_in_one_call():
    findings, _ = judge(ranks(*[REDUCE] * 4), 4)
    assert [(f.code, f.ranks, f.confidence) for f in findings] == [("network-stalled", (), Confidence.POSSIBLE)]
    assert judge(ranks(*[REDUCE] * 4, still=None), 4)[0] == []
    assert judge(ranks(*[BACKWARD] * 4), 4)[0] == []


def test_other_call_of_one_rank():
    """Of two ranks both are in it; of more, the few may be the ones that are right."""
    other = call("broadcast", Frame("/home/me/train.py", 51, "log"))
    findings, _ = judge(ranks(REDUCE, other), 2)
    assert [(f.code, f.ranks, f.confidence) for f in findings] == [("collective-mismatch", (0, 1), Confidence.LIKELY)]
    findings, _ = judge(ranks(REDUCE, REDUCE, other, REDUCE), 4)
    assert [(f.code, f.ranks, f.confidence) for f in findings] == [("collective-mismatch", (), Confidence.POSSIBLE)]
    assert "rank 2 in broadcast at /home/me/train.py:51 in log" in findings[0].summary


def test_missing_ranks_make_it_less_sure():
    findings, notes = judge(ranks(REDUCE, CODE), 8)
    assert findings[0].confidence is Confidence.POSSIBLE
    assert notes == ["no stacks of ranks 2-7: what they do is not known"]


def test_suspended_rank_comes_first():
    stacks = [RankStack(0, REDUCE, still=True), RankStack(1, CODE, still=True, suspended=True)]
    findings, _ = judge(stacks, 2)
    assert [(f.code, f.ranks, f.confidence) for f in findings] == [("rank-stopped", (1,), Confidence.CERTAIN)]


def test_lock_held_in_native_code():
    stacks = [RankStack(0, REDUCE, still=True), RankStack(1, CODE, still=True, holds_lock=True)]
    findings, _ = judge(stacks, 2)
    assert [(f.code, f.ranks) for f in findings] == [("gil-held", (1,))]
    assert "and holds Python's lock, while rank 0 waits" in findings[0].summary


def test_one_rank_alone_is_no_verdict():
    assert judge(ranks(CODE), 4)[0] == []


def test_order_of_ranks_does_not_matter():
    stacks = ranks(REDUCE, REDUCE, CODE, REDUCE)
    assert judge(stacks, 4) == judge(stacks[::-1], 4)
