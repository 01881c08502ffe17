"""What goes into a collective comes out of it, for every kind of call and way of waiting. Tried with torch 2.13."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional

import dtobs
from dtobs.detectors.silent import corrupted_communication
from dtobs.detectors.silent.corrupted_communication import _calls, _judge
from dtobs.probes.conservation import ConservationProbe
from dtobs.recording.laws import CONSERVATION
from dtobs.recording.view import RunView, load_run
from tests.harness import run_ranks


def every_kind(rank: int, world: int, folder: Path) -> None:
    torch.manual_seed(rank)
    with dtobs.attach(run_dir=folder, monitor=False, probes={"conservation": "all"}) as session:
        for operation in (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.SUM):
            dist.all_reduce(torch.randn(4), op=operation)
        x, pair = torch.randn(4), [torch.empty(4) for _ in range(world)]
        dist.broadcast(x, src=1)
        x = torch.randn(4)
        dist.reduce(x, dst=0)
        dist.all_gather(pair, x)
        dist.all_gather_into_tensor(torch.empty(8), x)
        dist.reduce_scatter_tensor(torch.empty(2), x)
        dist.reduce_scatter(torch.empty(4), pair)
        dist.all_to_all_single(torch.empty(4), x)
        dist.gather(x, pair if rank == 0 else None, dst=0)
        dist.scatter(torch.empty(4), pair if rank == 0 else None, src=0)
        if rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
        half = torch.randn(4096).bfloat16()
        dist.all_reduce(half, async_op=True).wait()
        dist.broadcast(torch.randn(8, 8).t(), src=0)
        functional.all_reduce(x, "sum", dist.group.WORLD) + 1
        ddp = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        for _ in range(3):
            ddp(torch.randn(3, 4)).sum().backward()
            session.step()


def reused_input(rank: int, world: int, folder: Path) -> None:
    """Rank 1 has changed, when its gather has been waited for, what it put in."""
    torch.manual_seed(rank)
    with dtobs.attach(run_dir=folder, monitor=False):
        for call in range(8):
            x, gathered = torch.randn(1000), torch.zeros(2000)
            work = dist.all_gather_into_tensor(gathered, x, async_op=True)
            assert work is not None
            while call == 6 and not work.is_completed():
                pass
            if call == 6 and rank == 1:
                x[3] += 1
            if call == 6:
                gathered[1003] += 1  # what peers would have got of it
            work.wait()


def shared_memory(rank: int, world: int, folder: Path) -> None:
    """Calls one after another on the same tensor, as NCCL allows it of calls of one group, and others beside them."""
    torch.manual_seed(rank)
    with dtobs.attach(run_dir=folder, monitor=False, probes={"conservation": "all"}) as session:
        probe = session._context.conservation  # type: ignore[attr-defined]
        for call in range(10):
            x = torch.randn(1000)
            if call % 2:
                dist.all_reduce(x)
                continue
            whole = torch.zeros(2000)
            first = dist.all_gather_into_tensor(whole, x, async_op=True)
            second = dist.broadcast(whole[500:600], src=0, async_op=True)  # a part of what the first one writes
            assert first is not None and second is not None
            assert not probe.under_way or len(probe.under_way) == 1
            second.wait()
            first.wait()
            assert not probe.under_way and not probe.waiting
        forgotten = dist.broadcast(whole, src=0, async_op=True)
        again = dist.broadcast(whole, src=0, async_op=True)
        assert forgotten is not None and again is not None
        while not (forgotten.is_completed() and again.is_completed()):
            time.sleep(0.01)
        probe.step_end()
        assert not probe.under_way  # what is done is not kept, though nobody has waited for it
        forgotten.wait()
        again.wait()
        neighbours = torch.randn(2, 1000)
        for work in [dist.all_reduce(row, async_op=True) for row in neighbours]:  # next to each other, nothing shared
            assert work is not None
            work.wait()


def judged(folder: Path) -> tuple[RunView, int, int]:
    view = load_run(folder)
    assert [int(page["probe_failures"]) for page in view.pages] == [0, 0]
    calls = _calls(view)
    assert calls is not None
    whole, broken = _judge(view, calls)
    return view, int(whole.sum()), int(broken.sum())


def test_every_kind_of_call_is_compared_and_whole(tmp_path: Path):
    run_ranks(every_kind, 2, tmp_path)
    view, whole, broken = judged(tmp_path)
    assert broken == 0
    assert corrupted_communication(view) == []
    seen = {view.meta(rank).ops[int(r["op"])].op for rank in (0, 1) for r in view.law(CONSERVATION, rank)}
    kinds = {"all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"}
    assert seen == {*kinds, "send", "recv"}
    calls = _calls(view)
    assert calls is not None and whole == len(calls.first) - 1  # nothing was read and left unjudged


def test_an_input_that_changes_under_way_is_named(tmp_path: Path):
    run_ranks(reused_input, 2, tmp_path)
    view, _, broken = judged(tmp_path)
    assert broken == 1
    (finding,) = corrupted_communication(view)
    assert finding.ranks == (1,)
    assert finding.summary.startswith("rank 1 changed while it was under way what is sent in all_gather #7")


def test_memory_that_two_calls_under_way_share_is_not_judged(tmp_path: Path):
    run_ranks(shared_memory, 2, tmp_path)
    view, whole, broken = judged(tmp_path)
    assert broken == 0
    assert corrupted_communication(view) == []
    assert whole == 5 + 2  # the reductions between them, and those next to each other
    assert {view.meta(0).ops[int(r["op"])].op for r in view.law(CONSERVATION, 0)} == {"all_reduce"}


def coalesced(rank: int, world: int, folder: Path) -> list[int]:
    """How many calls are looked at: two that have no Work of their own, then with one, then when that is through.

    Gloo gives each call its Work: what NCCL does is told to the probe.
    """
    with dtobs.attach(run_dir=folder, monitor=False, probes={"conservation": "all"}) as session:
        (probe,) = [p for p in session._probes.context.probes if isinstance(p, ConservationProbe)]
        work = dist.all_reduce(torch.ones(4), async_op=True)
        assert work is not None
        (look,) = probe.waiting.values()
        probe.waiting.clear()
        seen = []
        for way in ("alone", "coalesced", "in order"):
            mine = [replace(look, work=None, in_order=way == "in order") for _ in range(2)]
            if way != "alone":
                probe._coalesce()
            for one in mine:
                probe._issued(one, None)
            seen.append(len(probe.waiting))
            if way != "alone":
                probe._end_coalescing(work if way == "coalesced" else None)
            seen.append(len(probe.waiting))
            probe.waited(work)
            seen.append(len(probe.waiting))
        probe._issued(replace(look, work=None, in_order=True), None)
        seen.append(len(probe.waiting))
        work.wait()
    dist.barrier()
    return seen


def test_calls_that_are_coalesced_are_read_when_all_are_through(tmp_path: Path):
    """Read at once, a receive has not begun: on an H100 healthy pipelines were accused of corrupted messages."""
    for result in run_ranks(coalesced, 2, tmp_path / "run"):
        assert result.value == [0, 0, 0, 2, 2, 0, 2, 0, 0, 0]
