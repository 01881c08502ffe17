"""Process groups that are destroyed and made again in one process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtobs.probes.layout import find_layout, model_tensors, tokens_shared_by, wrappers
from dtobs.probes.process_groups import GroupTable
from dtobs.probes.rendezvous import wrap_init_process_group
from dtobs.recording.arrivals import Arrival
from dtobs.recording.rundir import RunDirectory


@pytest.fixture
def world(tmp_path: Path) -> Any:
    """Makes a world of one rank; each call destroys the one before."""
    made = []

    def make() -> dist.ProcessGroup:
        if dist.is_initialized():
            dist.destroy_process_group()
        made.append(tmp_path / str(len(made)))
        dist.init_process_group("gloo", init_method=f"file://{made[-1]}", rank=0, world_size=1)
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


def test_calls_of_a_new_world_are_not_taken_for_those_of_the_old_one_of_the_same_name(world):
    table = GroupTable(SimpleNamespace(define=lambda *_, **__: None))  # type: ignore[arg-type]
    old = world()
    before = table.state(old)
    before.seq = 135
    assert table.state(old) is before
    new = world()
    assert new.group_name == old.group_name
    after = table.state(new)
    assert after.number != before.number
    assert after.seq == 0


def test_the_hosts_tensors_have_an_order_of_their_own_where_another_backend_carries_them(world):
    """As in a world of "cpu:gloo,cuda:nccl", on which a thread saves a checkpoint while the training goes on."""
    group = world()
    defined = {}
    meta: Any = SimpleNamespace(define=lambda _, number, **fields: defined.update({number: fields}))
    names = {"cpu": "gloo", "cuda": "nccl"}

    class Mixed:
        """This torch has no backend of a device."""

        _device_types = (torch.device("cuda"), torch.device("cpu"))
        group_name, group_desc = group.group_name, group.group_desc

        def __getattr__(self, name: str) -> Any:
            return getattr(group, name)

        def name(self) -> str:
            return "nccl"

        def _get_backend(self, device: torch.device) -> Any:
            return SimpleNamespace(name=lambda: names[device.type])

    table, mixed = GroupTable(meta), Mixed()
    state = table.state(mixed)  # type: ignore[arg-type]
    assert state.on_host is not None
    assert state.on_host.number != state.number
    assert [(fields["description"], fields["backend"]) for fields in defined.values()] == [
        ("default_pg", "nccl"),
        ("default_pg (gloo)", "gloo"),
    ]
    names["cuda"] = "gloo"
    assert table.state(Mixed()).on_host is None  # type: ignore[arg-type]
    assert table.state(group).on_host is None


def test_a_wrapper_of_a_destroyed_world_is_passed_over(world):
    world()
    net = nn.Linear(2, 2)
    first = DistributedDataParallel(net)
    assert wrappers(first) == [first]
    world()
    second = DistributedDataParallel(net)
    both = nn.ModuleList([first, second])
    assert wrappers(both) == [second]
    assert find_layout(both).kind == "ddp"
    assert [t.row.name for t in model_tensors(both)]
    assert torch.isfinite(second(torch.ones(1, 2))).all()


def test_a_failure_of_ours_on_the_way_into_a_group_is_said_and_not_raised(tmp_path, capsys):
    def fails() -> Arrival:
        raise AttributeError("no attribute 'since_ns'")

    seen = wrap_init_process_group(RunDirectory(tmp_path), fails)(lambda *_, **__: "the group")
    assert seen() == "the group"
    said = capsys.readouterr().err
    assert said == "dtobs: the way into the process group is not recorded: AttributeError: no attribute 'since_ns'\n"


def test_a_tensor_on_a_part_of_a_mesh_knows_who_reads_other_samples(world):
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(nn.Linear(4, 4), mesh["tensor"], ColwiseParallel())
    layout = find_layout(model)
    assert (layout.data_ranks, layout.coordinates) == ((1, 3), {"data": 0, "tensor": 1})
    assert find_layout(model, mesh["tensor"]).data_ranks == (1,), "what is given is believed"


@pytest.mark.parametrize(("given", "ranks"), [(Replicate(), [0, 1]), (Shard(1), [])])
def test_a_plan_says_on_which_ranks_tokens_are_the_same(world, given: Any, ranks: list[int]):
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = nn.ModuleDict({"tokens": nn.Embedding(8, 4), "out": nn.Linear(4, 8)})
    assert tokens_shared_by(model) == []
    plan = {"tokens": RowwiseParallel(input_layouts=given), "out": ColwiseParallel()}
    assert tokens_shared_by(parallelize_module(model, mesh["tensor"], plan)) == ranks


def test_meshes_that_are_made_of_one_world_mesh_tell_what_its_name_does_not(world):
    """As torchtitan makes them: with context parallelism a dense layer is sharded over ranks that share samples."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
    root = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
    batches = root._unflatten(0, (1, 2, 2, 2), ("pp", "batch", "cp", "tp"))
    dense = root._unflatten(0, (1, 1, 4, 2), ("pp", "dp_replicate", "fsdp", "tp"))
    model = parallelize_module(nn.Linear(4, 4), dense["tp"], ColwiseParallel())
    layout = find_layout(model)
    assert layout.data_ranks == (1, 5)
    assert layout.coordinates == {"pp": 0, "batch": 0, "cp": 0, "tp": 1}
    assert find_layout(model, root).data_ranks == (1, 5), "what is given says nothing"
    del batches
    assert find_layout(model).data_ranks == (1, 3, 5, 7), "there is nothing else to go by"
    del dense
