"""Every way to communicate is seen by the BackendSelect kernels, on real ranks. Tried with torch 2.13 on Gloo."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import nn

import dtobs
from dtobs.events import Kind, number_of, tag_of
from dtobs.probes.c10d_ops import Interception, Operator, discover
from dtobs.probes.reduce_ops import READABLE, ReduceOps
from dtobs.recording.laws import SPLITS
from dtobs.recording.view import RunView, load_run
from tests.harness import run_ranks

THIS_FILE = __file__


def attach(folder: Path, **options: Any) -> dtobs.Session:
    return dtobs.attach(run_dir=folder, monitor=False, **options)


def issued(view: RunView, rank: int = 0) -> list[str]:
    """Names of what a rank issued, in order."""
    meta = view.meta(rank)
    events = view.events(rank)
    return [meta.ops[int(e["op"])].op for e in events if e["kind"] in (Kind.COLLECTIVE, Kind.P2P)]


def all_plain(rank: int, world: int, folder: Path) -> None:
    with attach(folder):
        x, pair = torch.ones(4), [torch.empty(4) for _ in range(world)]
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        dist.broadcast(x, src=1)
        dist.reduce(x, dst=0)
        dist.all_gather(pair, x)
        dist.all_gather_into_tensor(torch.empty(8), x)
        dist.reduce_scatter_tensor(torch.empty(2), x)
        dist.reduce_scatter(torch.empty(4), pair)
        dist.all_to_all_single(torch.empty(4), x)
        taken, sent = ([1, 4], [0, 4]) if rank else ([3, 0], [3, 1])
        dist.all_to_all_single(torch.empty(sum(taken), 3), torch.ones(4, 3), taken, sent)
        dist.gather(x, pair if rank == 0 else None, dst=0)
        dist.scatter(torch.empty(4), pair if rank == 0 else None, src=0)
        dist.barrier()
        dist.monitored_barrier()
        if rank == 0:
            dist.send(x, 1, tag=3)
            dist.recv(x, 1)
        else:
            dist.recv(x, 0, tag=3)
            dist.send(x, 0)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, pair[0], 1 - rank)]
        ):
            work.wait()
        dist.all_reduce(x, async_op=True).wait()
        dist.all_gather_object([None] * world, {"rank": rank})
        dist.broadcast_object_list([rank], src=0)


def test_every_plain_collective(tmp_path: Path):
    run_ranks(all_plain, 2, tmp_path / "run")
    view = load_run(tmp_path / "run")
    names = issued(view)
    assert names[:13] == [
        "all_reduce",
        "broadcast",
        "reduce",
        "all_gather",
        "all_gather",
        "reduce_scatter",
        "reduce_scatter",
        "all_to_all",
        "all_to_all",
        "gather",
        "scatter",
        "barrier",
        "monitored_barrier",
    ]
    assert names[13:17] == ["send", "recv", "send", "recv"]
    assert issued(view, 1)[13:17] == ["recv", "send", "send", "recv"]
    assert Counter(names)["all_gather"] >= 4  # objects travel by it
    assert view.page(0)["probe_failures"] == 0
    # Both ranks wrote the same number for the same call, and count alike.
    first, second = (
        [(int(e["group"]), int(e["seq"]), int(e["op"])) for e in view.events(r) if e["kind"] == Kind.COLLECTIVE]
        for r in (0, 1)
    )
    assert first == second
    assert [seq for _, seq, _ in first] == list(range(1, len(first) + 1))
    maximum = next(op for op in view.meta(0).ops.values() if op.op == "all_reduce")
    assert (maximum.reduce_op, maximum.shapes, maximum.dtypes) == ("max", ((4,),), ("float32",))
    assert {s.file for s in view.meta(0).sites.values()} == {THIS_FILE}
    dealt = [view.law(SPLITS, rank) for rank in (0, 1)]
    assert [records["sent"][:, :3].tolist() for records in dealt] == [
        [[2, 2, -1], [9, 3, -1]],
        [[2, 2, -1], [0, 12, -1]],
    ]
    assert [records["taken"][:, :2].tolist() for records in dealt] == [[[2, 2], [9, 0]], [[2, 2], [3, 12]]]
    messages = [e for e in view.events(1) if e["kind"] == Kind.P2P]
    assert [int(e["value"]) for e in messages] == [0, 0, 0, 0]
    assert [(number_of(int(e["seq"])), tag_of(int(e["seq"]))) for e in messages] == [(1, 3), (1, 0), (2, 0), (2, 0)]


def waits(view: RunView, rank: int) -> list[tuple[int, int]]:
    return [(int(e["kind"]), int(e["seq"])) for e in view.events(rank) if e["kind"] in (Kind.WAIT_BEGIN, Kind.WAIT_END)]


def one_reduce(rank: int, world: int, folder: Path, level: str) -> None:
    with attach(folder, probes={"collectives": level}):
        dist.all_reduce(torch.ones(4))


@pytest.mark.parametrize("level", ["full", "cheap", "off"])
def test_levels(tmp_path: Path, level: str):
    run_ranks(one_reduce, 2, tmp_path / "run", level)
    view = load_run(tmp_path / "run")
    assert issued(view) == ([] if level == "off" else ["all_reduce"])
    assert len(view.meta(0).sites) == (1 if level == "full" else 0)
    assert waits(view, 0) == [
        (Kind.WAIT_BEGIN, 0 if level == "off" else 1),
        (Kind.WAIT_END, 0 if level == "off" else 1),
    ]


def waits_later(rank: int, world: int, folder: Path) -> None:
    with attach(folder):
        other, x = dist.new_group([0, 1]), torch.ones(4)
        for _ in range(3):
            dist.broadcast(x, src=0)
        message = dist.isend(x, 1) if rank == 0 else dist.irecv(torch.empty(4), 0)
        reduced = dist.all_reduce(x, group=other, async_op=True)
        dist.barrier()
        assert message is not None
        assert reduced is not None
        message.wait()
        reduced.wait()


def test_a_wait_is_that_of_the_call_it_is_for(tmp_path: Path):
    """Also where others were issued since."""
    run_ranks(waits_later, 2, tmp_path / "run")
    view = load_run(tmp_path / "run")
    for rank in (0, 1):
        assert waits(view, rank)[-6::2] == [(Kind.WAIT_BEGIN, 4), (Kind.WAIT_BEGIN, 1), (Kind.WAIT_BEGIN, 1)]
        begun = [e for e in view.events(rank) if e["kind"] == Kind.WAIT_BEGIN][-3:]
        assert begun[0]["group"] == begun[1]["group"] != begun[2]["group"]


def groups_and_threads(rank: int, world: int, folder: Path) -> None:
    with attach(folder):
        pair = dist.new_group([0, 1], group_desc="the pair")
        alone = [dist.new_group([r]) for r in range(world)][rank]
        dist.all_reduce(torch.ones(2), group=pair)
        dist.all_reduce(torch.ones(2), group=alone)
        thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(3), group=pair))
        thread.start()
        thread.join()
        dist.all_reduce(torch.ones(2))


def test_groups_of_their_own_and_other_threads(tmp_path: Path):
    run_ranks(groups_and_threads, 2, tmp_path / "run")
    view = load_run(tmp_path / "run")
    by_group: dict[str, list[int]] = {}
    events = [e for e in view.events(1) if e["kind"] == Kind.COLLECTIVE]
    for event in events:
        by_group.setdefault(str(view.meta(1).groups[int(event["group"])]), []).append(int(event["seq"]))
    assert by_group["the pair"] == [1, 2]
    assert {view.meta(1).groups[int(e["group"])].ranks for e in events} == {(0, 1), (1,)}
    assert len({int(e["thread"]) for e in events}) == 2
    assert view.groups().keys() > view.meta(0).groups.keys()  # the two groups of one have different numbers


def functional(rank: int, world: int, folder: Path, compiled: bool) -> float:
    def compute(x: torch.Tensor) -> torch.Tensor:
        return functional_collectives.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    with attach(folder):
        run = torch.compile(compute, backend="aot_eager") if compiled else compute
        return float(run(torch.ones(3))[0])


@pytest.mark.parametrize("compiled", [False, True])
def test_functional_collectives(tmp_path: Path, compiled: bool):
    results = run_ranks(functional, 2, tmp_path / "run", compiled, timeout=120)
    assert [r.value for r in results] == [5.0, 5.0]
    view = load_run(tmp_path / "run")
    assert "all_reduce" in issued(view)
    assert Kind.WAIT_BEGIN in view.events(0)["kind"]


def reductions(rank: int, world: int) -> list[tuple[str, int, int]]:
    """What each call reduces by, as it is noted where the box cannot be read and as the box says."""
    seen: list[tuple[str, int, int]] = []
    with ExitStack() as undo:
        noted = ReduceOps(readable=False)
        noted.install(undo, lambda function: function)
        kernels = Interception()
        undo.callback(kernels.undo)

        def kernel(operator: Operator, redispatch: Any, mask: Any) -> Callable[..., Any]:
            def look(keys: Any, *args: Any) -> Any:
                if operator.reduce_op >= 0:
                    box = args[operator.reduce_op]
                    seen.append((operator.name, noted.read(box), box.op()))
                return redispatch(keys & mask, *args)

            return look

        kernels.install(discover(), kernel)
        x, kinds = torch.ones(4), dist.ReduceOp
        dist.all_reduce(x)
        dist.all_reduce(x, op=kinds.MAX)
        dist.reduce(x, 0, op=kinds.PRODUCT)
        dist.reduce_scatter_tensor(torch.empty(2), x, op=kinds.MIN)
        dist.reduce_scatter(torch.empty(2), [torch.ones(2)] * world, op=kinds.MAX)
        torch.distributed.group.WORLD.allreduce([x], op=kinds.MIN).wait()
        dist.all_reduce_coalesced([x, x], op=kinds.MAX)
        functional_collectives.all_reduce(x, "max", dist.group.WORLD).sum()
        functional_collectives.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD).sum()
        with suppress(RuntimeError):
            dist.all_reduce(x.bool(), op=kinds.AVG)
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
        model(torch.ones(2, 4)).sum().backward()
        largest = functools.partial(dist.all_reduce, op=kinds.MAX, async_op=True)
        model.register_comm_hook(
            None, lambda _, bucket: largest(bucket.buffer()).get_future().then(lambda future: future.value()[0])
        )
        model(torch.ones(2, 4)).sum().backward()
    return seen


@pytest.mark.skipif(not READABLE, reason="this torch does not tell what a call reduces by")
def test_reductions_are_noted_where_torch_does_not_tell_them():
    seen = run_ranks(reductions, 2)[0].value
    assert [noted for _, noted, _ in seen] == [told for _, _, told in seen]
    assert len({told for *_, told in seen}) == 5
    assert len(seen) > 10


def data_parallel(rank: int, world: int, folder: Path, kind: str) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (world,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    with attach(folder, model=model, optimizer=optimizer):
        for step in range(3):
            inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("kind", "operations"), [("ddp", {"all_reduce"}), ("fsdp2", {"all_gather", "reduce_scatter"})])
def test_data_parallel_steps(tmp_path: Path, kind: str, operations: set[str]):
    observed = [r.value for r in run_ranks(data_parallel, 2, tmp_path / "run", kind)]
    plain = [r.value for r in run_ranks(data_parallel, 2, tmp_path / "no", kind, env={"DTOBS_DISABLE": "1"})]
    assert observed == plain
    view = load_run(tmp_path / "run")
    assert operations <= set(issued(view))
    for rank in (0, 1):
        steps = view.rank_steps(rank)
        assert steps["step"].tolist() == [1, 2, 3]
        assert (steps["exposed_ns"] > 0).all()
        assert (steps["collectives"] > 0).all()
        assert (steps["sync_seq"] > 0).all()
        parts = sum(steps[f"{p}_ns"] for p in dtobs.events.STEP_PARTS)
        assert (parts == steps["end_ns"] - steps["begin_ns"]).all()
    # The first collective of the backward is the same one on both ranks.
    assert (view.rank_steps(0)["sync_seq"] == view.rank_steps(1)["sync_seq"]).all()
    assert (view.pages["probe_failures"] == 0).all()


def tensor_parallel(rank: int, world: int, folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    with attach(folder):
        sharded = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        sharded.full_tensor()


def test_dtensor(tmp_path: Path):
    run_ranks(tensor_parallel, 2, tmp_path / "run")
    assert {"scatter", "all_gather_coalesced"} <= set(issued(load_run(tmp_path / "run")))


def attach_again(rank: int, world: int, folder: Path) -> list[float]:
    values = []
    for number in range(3):
        with attach(folder / str(number)):
            x = torch.ones(2)
            dist.all_reduce(x)
            values.append(float(x[0]))
        dist.all_reduce(x)  # nobody listens, and it works
        values.append(float(x[0]))
    return values


def test_close_and_attach_again(tmp_path: Path):
    results = run_ranks(attach_again, 2, tmp_path)
    assert [r.value for r in results] == [[2.0, 4.0] * 3] * 2
    assert [issued(load_run(tmp_path / str(n))) for n in range(3)] == [["all_reduce"]] * 3


def init_again(rank: int, world: int, folder: Path, store: Path) -> None:
    for number in range(2):
        dist.init_process_group("gloo", store=dist.FileStore(f"{store}-{number}", world), rank=rank, world_size=world)
        if number == 0:
            session = attach(folder)
        dist.all_reduce(torch.ones(2))
        dist.barrier()
        dist.destroy_process_group()
    session.close()


def test_destroy_and_init_again(tmp_path: Path):
    run_ranks(init_again, 2, tmp_path / "run", tmp_path / "store", init_pg=False)
    view = load_run(tmp_path / "run")
    assert issued(view) == ["all_reduce", "barrier"] * 2
    assert view.page(0)["probe_failures"] == 0


def broken_kernel(rank: int, world: int, folder: Path) -> list[float]:
    from dtobs.probes.call_site import CallSites

    def fail(*arguments: object) -> int:
        raise ArithmeticError("broken inside")

    values = []
    CallSites.here = fail  # type: ignore[assignment]
    with attach(folder):
        for _ in range(3):
            x = torch.ones(2)
            dist.all_reduce(x)
            values.append(float(x[0]))
    return values


def test_a_broken_kernel_switches_itself_off(tmp_path: Path):
    assert [r.value for r in run_ranks(broken_kernel, 2, tmp_path / "run")] == [[2.0] * 3] * 2
    view = load_run(tmp_path / "run")
    assert view.page(0)["probe_failures"] == 1
    assert view.meta(0).probes["collectives"]["reason"] == "ArithmeticError: broken inside"


def many(rank: int, world: int, folder: Path, count: int) -> float:
    """Collectives from two threads on two groups, with Python work between them: what makes a held GIL deadlock."""
    side = dist.new_group([0, 1])
    total = torch.zeros(1)

    def aside() -> None:
        for _ in range(count // 2):
            dist.all_reduce(torch.ones(64), group=side)

    with attach(folder):
        thread = threading.Thread(target=aside)
        thread.start()
        for _ in range(count // 2):
            x = torch.ones(64)
            dist.all_reduce(x)
            total += x[0]
        thread.join()
    return float(total)


@pytest.mark.slow
def test_no_deadlock_in_eight_runs(tmp_path: Path):
    for number in range(8):
        results = run_ranks(many, 2, tmp_path / str(number), 200, timeout=60)
        assert [r.value for r in results] == [200.0, 200.0]
