"""The session on real ranks: one run directory for all, and a rank that hangs says where."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dtobs
from dtobs.detectors.hangs.situation import interpret
from dtobs.events import Phase, RankState
from dtobs.recording.view import RunView, load_run
from dtobs.session import identity
from tests.harness import Gate, run_ranks, start_ranks


def default_run_dir(rank: int, world: int, folder: Path) -> tuple[str, str]:
    os.chdir(folder)
    paths = []
    for _ in range(2):
        with dtobs.attach(name=f"trial {rank}", monitor=False) as session:
            paths.append(session.run_dir.name)
        dist.barrier()
        time.sleep(1.1)  # the name of a run has its second in it
    return paths[0], paths[1]


def test_ranks_agree_on_a_run_directory_without_a_collective(tmp_path: Path):
    first, second = (r.value for r in run_ranks(default_run_dir, 2, tmp_path, env={"DTOBS_RUN_DIR": None}))
    assert first == second
    assert first[0] != first[1]
    assert first[0].endswith("-trial-0")
    view = load_run(tmp_path / "runs" / first[0])
    assert view.ranks == [0, 1]
    info = json.loads((view.root / "run.json").read_text())
    assert (info["schema"], info["name"], info["world_size"]) == ("dtobs.run/1", "trial 0", 2)


def on_a_host(rank: int, world: int, folder: Path) -> None:
    identity.boot_id = lambda: f"host {rank % 2}"
    dtobs.attach(run_dir=folder, monitor=False).close()


def test_ranks_of_one_host_are_one_node_where_no_launcher_says_it(tmp_path: Path):
    """As under Ray: each process is given one device and says that it is local rank 0."""
    silent = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": None, "GROUP_RANK": None}
    run_ranks(on_a_host, 4, tmp_path / "run", env=silent)
    view = load_run(tmp_path / "run")
    nodes = {rank: int(view.page(rank)["node"]) for rank in view.ranks}
    assert sorted(nodes) == [0, 1, 2, 3]
    assert nodes[0] == nodes[2] != nodes[1] == nodes[3]
    assert set(nodes.values()) == {0, 1}


def describe(rank: int, world: int, folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("replicate", "shard"))
    config = {"lr": 0.1, "wandb_api_key": "abc", "model": {"tokens": 5, "password": "x"}}
    dtobs.attach(run_dir=folder, mesh=mesh, config=config, monitor=False, hang_timeout=12.5).close()


def test_run_json(tmp_path: Path):
    run_ranks(describe, 2, tmp_path / "run")
    text = (tmp_path / "run/run.json").read_text()
    info = json.loads(text)
    assert info["mesh"] == {
        "dim_names": ["replicate", "shard"],
        "shape": [1, 2],
        "groups": {"replicate": [[0], [1]], "shard": [[0, 1]]},
    }
    assert info["config"]["model"]["tokens"] == 5
    assert "abc" not in text
    assert info["config"]["model"]["password"] == "(hidden)"
    assert info["versions"]["torch"] == torch.__version__
    assert (tmp_path / "run/run.json").stat().st_mode & 0o077 == 0
    assert (load_run(tmp_path / "run").pages["hang_timeout_ns"] == 12_500_000_000).all()


def until(folder: Path, true: Callable[[RunView], bool], seconds: float = 30.0) -> RunView:
    """The run of two ranks in `folder`, once both record and `true` is."""
    deadline = time.monotonic() + seconds
    while True:
        seen = load_run(folder) if (folder / "run.json").exists() else None
        if seen is not None and seen.ranks == [0, 1] and true(seen):
            return seen
        assert time.monotonic() < deadline, seen
        time.sleep(0.02)


def hang(rank: int, world: int, folder: Path, gate: Gate, buffers: bool = False) -> None:
    """Rank 1 stays before a forward, so that rank 0 waits in its backward or, with buffers, before its forward."""
    torch.manual_seed(0)
    layers = (nn.Linear(8, 8), nn.BatchNorm1d(8)) if buffers else (nn.Linear(8, 8),)
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with dtobs.attach(model, optimizer, run_dir=folder, monitor=False) as session:
        for step in range(4):
            if step == 2 and rank == 1:
                with session.phase("data"):
                    gate.wait()
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()


def test_a_rank_that_waits_in_ddps_broadcast_of_buffers_is_seen_there(tmp_path: Path):
    gate = Gate(tmp_path / "gate")
    with start_ranks(hang, 2, tmp_path / "run", gate, True) as group:
        view = until(
            tmp_path / "run",
            lambda v: (
                v.page(1)["phase"] == Phase.DATA
                and bool(v.page(0)["wait_since_ns"])
                and v.page(0)["collective_seq"] > v.page(1)["collective_seq"]
            ),
        )
        situation = interpret(view)
        assert str(view.rank(0).waits_in).startswith("broadcast(")
        assert situation.calls.behind(situation.blocked[0].group, situation.blocked[0].seq) == [1]
        gate.open()
        assert group.wait(30)


def test_a_rank_that_waits_in_the_reducer_is_seen_waiting(tmp_path: Path):
    gate = Gate(tmp_path / "gate")
    with start_ranks(hang, 2, tmp_path / "run", gate) as group:
        view = until(tmp_path / "run", lambda v: bool(v.page(0)["wait_since_ns"]) and v.page(1)["phase"] == Phase.DATA)
        waiting, absent = view.page(0), view.page(1)
        assert (waiting["phase"], waiting["step"]) == (Phase.BACKWARD, 3)
        assert (absent["phase"], absent["wait_since_ns"]) == (Phase.DATA, 0)
        # One collective more than the rank that never came.
        assert waiting["collective_seq"] == absent["collective_seq"] + 1
        site = view.meta(0).sites[int(waiting["collective_site"])]
        assert (site.file, site.function) == (__file__, "hang")
        op = view.meta(0).ops[int(waiting["collective_op"])]
        assert str(op) == "all_reduce(sum, float32[72])"
        gate.open()
        assert group.wait(30)
    view = load_run(tmp_path / "run")
    assert (view.pages["wait_since_ns"] == 0).all()
    assert (view.pages["steps_done"] == 4).all()
    step = view.rank_steps(0)[2]
    assert step["exposed_ns"] > step["backward_ns"]  # it waited for the other rank's data


def stuck(rank: int, world: int, folder: Path, gate: Gate) -> None:
    with dtobs.attach(run_dir=folder, monitor=False):
        dist.barrier()
        if rank == 1:
            gate.wait()
        dist.barrier()


def test_stacks_and_flight_recorder_of_a_waiting_rank(tmp_path: Path):
    from dtobs.host.stacks import parse_stacks
    from dtobs.probes.worker_server import answers

    gate = Gate(tmp_path / "gate")
    with start_ranks(stuck, 2, tmp_path / "run", gate) as group:
        until(tmp_path / "run", lambda v: v.page(0)["collective_seq"] == 2)
        process = load_run(tmp_path / "run").meta(0).process
        assert answers(Path(process["worker_server"]))
        os.kill(process["pid"], process["stacks_signal"])
        stacks = Path(process["stacks_file"])
        deadline = time.monotonic() + 20
        while "in stuck" not in stacks.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert any(t.mentions("stuck") for t in parse_stacks(stacks.read_text()))
        gate.open()
        assert group.wait(30)
    assert (load_run(tmp_path / "run").pages["state"] == RankState.CLOSED).all()
    assert not Path(process["worker_server"]).parent.exists()


def accumulate(rank: int, world: int, folder: Path) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with dtobs.attach(model, optimizer, run_dir=folder, monitor=False):
        for _ in range(3):
            with model.no_sync():
                model(torch.ones(2, 64)).sum().backward()
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()


def test_accumulation_communicates_once_a_step(tmp_path: Path):
    run_ranks(accumulate, 2, tmp_path / "run")
    steps = load_run(tmp_path / "run").rank_steps(0)
    assert steps["micro_batches"].tolist() == [2, 2, 2]
    # DDP tells the others how it regrouped its buckets in the second synchronised forward, and never again.
    assert steps["collectives"][2] == 1
    assert steps["collective_bytes"][2] == (64 * 64 + 64) * 4


class Small(nn.Module):
    """A model of the user's own: dynamo passes over a bare nn.Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


def compiled(rank: int, world: int, folder: Path, how: str) -> list[float]:
    torch.manual_seed(0)
    model: nn.Module = Small()
    if how == "in place":
        model.compile(backend="aot_eager")
    else:
        model = torch.compile(model, backend="aot_eager")  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    with dtobs.attach(model, optimizer, run_dir=folder, monitor=False):
        for step in range(4):
            inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    import torch._dynamo.utils as dynamo

    assert dynamo.counters["graph_break"] == {}
    assert dynamo.counters["stats"]["unique_graphs"] == 1
    return losses


@pytest.mark.parametrize("how", ["in place", pytest.param("wrapped", marks=pytest.mark.exhaustive(one_in=4))])
def test_compiled_models_are_neither_recompiled_nor_broken_up(tmp_path: Path, how: str):
    observed = run_ranks(compiled, 1, tmp_path / "run", how, timeout=120)
    plain = run_ranks(compiled, 1, tmp_path / "no", how, timeout=120, env={"DTOBS_DISABLE": "1"})
    assert observed[0].value == plain[0].value
    steps = load_run(tmp_path / "run").rank_steps(0)
    assert steps["micro_batches"].tolist() == [1, 1, 1, 1]
    assert (steps["forward_ns"] > 0).all()
    assert (steps["backward_ns"] > 0).all()


def kill_me(rank: int, world: int, folder: Path) -> None:
    session = dtobs.attach(run_dir=folder, monitor=False)
    session.step(1)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_peers_of_a_killed_rank_write_down_how_they_failed(tmp_path: Path):
    def failing() -> None:
        run_ranks(kill_me, 2, tmp_path / "run", expect_exit={0: None, 1: -9})

    failing()
    view = load_run(tmp_path / "run")
    assert view.page(1)["state"] == RankState.RUNNING
    assert view.page(0)["wait_since_ns"] == 0


def train_in_a_thread(rank: int, world: int, folder: Path) -> None:
    """As Ray's workers do, which attach where `dtobs run` does; rank 1 is taken out of the middle of a step."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session = dtobs.attach(model, optimizer, run_dir=folder, monitor=False) if rank else None

    def loop() -> None:
        nonlocal session
        session = session or dtobs.attach(model, optimizer, run_dir=folder, monitor=False)
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
            dist.all_reduce(model.weight.grad)
            optimizer.step()
        with session.phase("data") if rank == 1 else contextlib.nullcontext():
            dist.destroy_process_group()

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()


def test_a_rank_that_trains_in_a_thread_and_is_taken_out_of_its_groups(tmp_path: Path):
    run_ranks(train_in_a_thread, 2, tmp_path / "run")
    first, second = (load_run(tmp_path / "run").rank(rank) for rank in (0, 1))
    assert first.training_thread != first.pid
    assert isinstance(first.meta.process["training_thread"], int)
    assert first.meta.process["dissolved_ns"] > 0
    assert "dissolved_ns" not in second.meta.process
    assert all(rank.meta.process["thread_ended_ns"] >= rank.get("attach_ns") for rank in (first, second))
