"""Small trainings on the devices there are: nothing is found, no probe fails, and the parts of a step add up.

On the host with Gloo everywhere, once more with tensors that only say that they are on a device, and with NCCL where
there is a GPU. One is enough for two ranks: each says that it is a host of its own, so NCCL lets them share it and
sends over sockets (run on an H100 with torch 2.11 and NCCL 2.28).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import dtobs
from dtobs.diagnose import diagnose, gather
from dtobs.events import STEP_PARTS
from dtobs.probes.deferred import Deferred
from dtobs.recording.view import RunView, load_run
from tests.harness import run_ranks, share_the_gpu

STEPS, BAD = 30, 14
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.exhaustive),
    "elsewhere",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


class Passed:
    """An event that has passed."""

    def query(self) -> bool:
        return True


def go_elsewhere() -> None:
    """From here on no tensor of this process says that it is on the host, and what is read of it comes later."""

    def arrives(self: Deferred, values: torch.Tensor, then: Any) -> None:
        held = values.detach().clone().numpy()
        self.after(Passed(), lambda: then(held))

    Deferred.put = arrives  # type: ignore[method-assign]
    torch.Tensor.is_cpu = property(lambda tensor: False)  # type: ignore[assignment]


def join(rank: int, world: int, kind: str, folder: Path) -> torch.device:
    """The process group of ranks that share one device."""
    device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        share_the_gpu(rank)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    return device


def exchange(rank: int, device: torch.device) -> None:
    """Both ways at once, as pipelines do: NCCL begins neither before both are issued."""
    mine, theirs = torch.full((4096,), float(rank), device=device), torch.empty(4096, device=device)
    operations = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, theirs, 1 - rank)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert theirs[0].item() == 1 - rank


def train(rank: int, world: int, kind: str, how: str, folder: Path, fault: str = "") -> None:
    device = join(rank, world, kind, folder)
    if kind == "elsewhere":
        go_elsewhere()
    torch.manual_seed(0)
    net = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.LayerNorm(64))]).to(device)
    model: Any = net
    if how == "ddp":
        model = DDP(net)
    elif how == "fsdp2":
        for layer in net:
            fully_shard(layer)
        model = fully_shard(net)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    made = torch.Generator().manual_seed(rank)
    with dtobs.attach(model, optimizer, run_dir=folder / "run", monitor=False, probes={"conservation": "all"}):
        for step in range(STEPS):
            x = torch.randn(8, 64, generator=made).to(device)
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            (loss * float("nan") if (fault, rank, step) == ("nan", 1, BAD) else loss).backward()
            if (fault, rank, step) == ("flip", 1, BAD):
                net[2].weight.data[3, 4] += 1e-3
            if fault == "scale" and rank:
                for parameter in net.parameters():
                    parameter.grad.mul_(0.5)  # type: ignore[union-attr]
            if how == "by hand":
                for parameter in net.parameters():
                    assert parameter.grad is not None
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= world
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            exchange(rank, device)
            dist.all_reduce(torch.ones(3, device=device))
        if kind == "cuda":
            torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


def trained(tmp_path: Path, kind: str, how: str, fault: str = "") -> RunView:
    run_ranks(train, 2, kind, how, tmp_path, fault, init_pg=False)
    return load_run(tmp_path / "run")


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("how", ["ddp", "fsdp2", "by hand"])
def test_a_healthy_training(kind: str, how: str, tmp_path: Path):
    view = trained(tmp_path, kind, how)
    assert [view.page(rank)["probe_failures"] for rank in (0, 1)] == [0, 0]
    assert diagnose(gather(tmp_path / "run")).findings == ()
    steps = view.steps()
    later = slice(3, STEPS - 2)  # the last values arrive after the run
    records = steps.records[:, later]
    wall = records["end_ns"] - records["begin_ns"]
    parts = sum(records[f"{part}_ns"].astype(np.int64) for part in STEP_PARTS)
    np.testing.assert_array_equal(parts, wall)
    assert (records["exposed_ns"] > 0).all()
    known = np.isfinite(steps.field("local_norm")[:, later])
    assert known.any(axis=1).all() if kind == "cuda" else known.all()  # of a device not in every step
    if kind == "cuda":
        assert (records["device_marks"] > 0).all()
        assert all(int(page["wait_since_ns"]) == 0 for page in view.pages), "no host waits in a call on a stream"


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize(
    ("fault", "code", "ranks", "step"),
    [
        ("flip", "replica-divergence", (0, 1), BAD),
        ("nan", "gradient-nonfinite", (1,), BAD + 1),
        ("scale", "gradient-scale-mismatch", (0, 1), 1),
    ],
)
def test_what_is_wrong_is_found(kind: str, fault: str, code: str, ranks: tuple[int, ...], step: int, tmp_path: Path):
    trained(tmp_path, kind, "ddp", fault)
    found = {finding.code: finding for finding in diagnose(gather(tmp_path / "run")).findings}
    assert found[code].ranks == ranks
    late = 2 if kind == "cuda" else 0  # there parameters are read in every second step
    assert step <= found[code].step <= step + late
