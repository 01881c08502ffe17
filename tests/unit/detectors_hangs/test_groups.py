"""Ranks that make different process groups, or of which one makes none, are told as that."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtobs.host.process import ProcessState
from dtobs.testing.fake_run import FakeRank, FakeRun
from tests.unit.detectors_hangs.trouble import captured, found, stack

LINE = "/home/me/train.py:{} in groups"


def construct(
    rank: FakeRank, number: int, ranks: list[int], *, line: int, name: str = "", done: bool = False
) -> FakeRank:
    rank.meta("construction", number=number, ranks=ranks, name=name, site=LINE.format(line), begin_ns=rank.clock_ns)
    return rank.meta("construction", number=number, state="done") if done else rank


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    made = FakeRun(tmp_path, world=4).steps(10)
    for rank in made.ranks:
        construct(rank, 1, [0, 1, 2, 3], line=7, done=True)
    return made


def test_a_rank_that_never_enters(run: FakeRun) -> None:
    for rank in run.ranks:
        if rank.number != 2:
            construct(rank, 2, [0, 1, 2, 3], line=8, name="mesh_dp")
    view = captured(run.view(later=600), rank_2=stack("/home/me/train.py:40 load", "/home/me/train.py:9 main"))
    (finding,) = found(view).values()
    assert (finding.code, finding.ranks, finding.group) == ("rendezvous-incomplete", (2,), "mesh_dp")
    assert finding.summary == (
        "rank 2 has never entered the construction of mesh_dp of ranks 0-3, in which ranks 0, 1 and 3 have waited 10"
        " min at /home/me/train.py:8 in groups; rank 2 is at /home/me/train.py:40 in load"
    )


def test_one_that_may_yet_come_is_no_alarm_to_who_asks_early(run: FakeRun) -> None:
    for rank in run.ranks[:3]:
        construct(rank, 2, [0, 1, 2, 3], line=8)
    view = run.view(later=20)
    assert found(view) == {}
    view.asked = True
    (finding,) = found(view).values()
    assert (finding.ranks, finding.confidence, finding.early) == ((3,), "possible", True)


def test_another_order_of_one_rank(run: FakeRun) -> None:
    for rank in run.ranks:
        first = [0, 3] if rank.number == 3 else [0, 1, 3]
        construct(rank, 2, first, line=9 if rank.number == 3 else 8)
    (finding,) = found(run.view(later=600)).values()
    assert (finding.code, finding.ranks, finding.confidence) == ("rendezvous-incomplete", (3,), "certain")
    assert (
        "rank 3 makes a group of ranks 0 and 3 at /home/me/train.py:9 in groups, but ranks 0-2 make" in finding.summary
    )


def test_each_its_own(run: FakeRun) -> None:
    """Two pairs that each make only their own group, which torch gives the same name: nobody is the odd one."""
    for rank in run.ranks:
        construct(rank, 2, [0, 1] if rank.number < 2 else [2, 3], line=8)
    (finding,) = found(run.view(later=600)).values()
    assert (finding.ranks, finding.confidence) == ((0, 1, 2, 3), "likely")


def test_another_name_that_was_made_long_ago(run: FakeRun) -> None:
    for rank in run.ranks:
        construct(rank, 2, [0, 1, 2, 3], line=8, name="b" if rank.number == 1 else "a", done=True)
        if rank.number != 1:
            construct(rank, 3, [0, 1, 2, 3], line=9)
    (finding,) = found(run.view(later=600)).values()
    assert finding.ranks == (1,)


def test_healthy_twins(run: FakeRun) -> None:
    for rank in run.ranks:
        construct(rank, 2, [0, 1], line=8, done=True)
        construct(rank, 3, [2, 3], line=9, done=True)
    assert not found(run.view(later=600)) or "rendezvous-incomplete" not in found(run.view(later=600))
    for rank in run.ranks:
        construct(rank, 4, [0, 1, 2, 3], line=8)
    assert "rendezvous-incomplete" not in found(run.view(later=5))
    assert "rendezvous-incomplete" not in found(run.view(later=600)), "all are there: that is not theirs"


def test_a_group_made_by_its_members_while_others_train_on(run: FakeRun) -> None:
    construct(run.rank(0), 2, [0, 1], line=8)
    for rank in run.ranks[1:]:
        for _ in range(50):
            rank.step()
    assert not found(run.view(later=1))


def test_a_suspended_rank_is_told_as_that(run: FakeRun) -> None:
    for rank in run.ranks[1:]:
        construct(rank, 2, [0, 1, 2, 3], line=8)
    stopped = {0: ProcessState(run.pid_of(0), alive=True, state="T")}
    assert list(found(run.view(later=600, processes=stopped))) == ["rank-stopped"]


@pytest.mark.parametrize("code", ["rank-stopped", "gil-held", "stuck-in-dataloader", "rank-not-joined"])
def test_one_cause_in_two_groups_is_one_finding_with_all_ranks(code: str, tmp_path: Path) -> None:
    run = FakeRun(tmp_path, world=4).steps(10)
    groups = {rank: run.group(f"dp{rank % 2}", (rank % 2, rank % 2 + 2)) for rank in range(4)}
    for rank in run.ranks:
        if rank.number < 2:
            rank.collective(group=groups[rank.number], wait=True)
        elif code == "stuck-in-dataloader":
            rank.phase("data")
    stopped = {r: ProcessState(run.pid_of(r), alive=True, state="T") for r in (2, 3)} if code == "rank-stopped" else {}
    view = run.view(later=600, processes=stopped)
    if code == "gil-held":
        place = stack("/home/me/train.py:30 native")
        view = captured(view, rank_2=("held", place), rank_3=("held", place))
    (finding,) = found(view).values()
    assert (finding.code, finding.ranks) == (code, (2, 3))
    assert "ranks 2 and 3" in finding.summary


def test_a_rank_that_makes_a_new_world_does_not_wait_in_a_call_of_the_old_one(training):
    """Its peer never came to the second init_process_group; the barrier that ended the first world is over."""
    run = training(2)
    for rank in run.ranks:
        rank.collective("barrier")
    inside = stack(
        "/x/site-packages/torch/distributed/distributed_c10d.py:2000 _new_process_group_helper",
        "/x/site-packages/torch/distributed/distributed_c10d.py:1700 init_process_group",
        "/me/train.py:11 main",
    )
    view = captured(run.view(later=61), rank_0=inside, rank_1=stack("/me/train.py:10 main"))
    (finding,) = found(view).values()
    assert (finding.code, finding.ranks) == ("rank-not-joined", (1,))
    assert finding.summary.startswith(
        "rank 1 has not joined: rank 0 has waited 61 s in init_process_group at /me/train.py:11 in main, "
        "and rank 1 is at /me/train.py:10 in main"
    )
