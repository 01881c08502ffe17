"""What the ranks of the tests of silent errors and lost time run; here, because ranks import the module by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dtobs
from dtobs.drills import lost_time
from dtobs.drills.capabilities import Confinement
from dtobs.drills.silent import SilentJob, train
from dtobs.probes import gradients


def run_silent(rank: int, world_size: int, job: SilentJob) -> None:
    """Train with a silent error, or without."""
    train(job)


def run_silent_sampled(rank: int, world_size: int, job: SilentJob) -> None:
    """As if the model were large: whole gradients in few steps only, a sample in the others."""
    gradients.WHOLE_BYTES_A_STEP = 1
    gradients.SAMPLE_FIRST, gradients.SAMPLE_SPREAD = 1, 1
    train(job)


def run_losing_time(
    rank: int, world_size: int, job: lost_time.TimeJob, confinements: Mapping[int, Confinement], store: Path
) -> None:
    """Train, and lose time, where `confinements` says that the rank lives; ranks meet through the file `store`."""
    confinements.get(rank, Confinement()).enter()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    lost_time.train(job)


def run_orders(rank: int, world_size: int, run_dir: Path, mixed: bool) -> None:
    """Gradients reduced as one tensor, put together in the model's order or, on each rank, in another one."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    made = torch.Generator().manual_seed(rank)
    order = list(model.parameters())
    if mixed:
        order = order[rank:] + order[:rank]
    with dtobs.attach(model, optimizer, run_dir=run_dir, monitor=False):
        for _ in range(40):
            x = torch.randn(16, 16, generator=made)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x.roll(1, 1)).backward()
            gradients_ = [p.grad for p in order if p.grad is not None]
            flat = torch.cat([g.flatten() for g in gradients_])
            dist.all_reduce(flat)
            for gradient, mean in zip(gradients_, flat.split([g.numel() for g in gradients_]), strict=True):
                gradient.copy_(mean.view_as(gradient) / world_size)
            optimizer.step()


def run_shards(rank: int, world_size: int, run_dir: Path, apart: bool) -> None:
    """Shards and their optimizer's state that each rank reads back from its own files, of one step or of two."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(2)))
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    made = torch.Generator().manual_seed(rank)
    saved: dict[int, list[tuple[torch.Tensor, dict[str, torch.Tensor]]]] = {}
    with dtobs.attach(model, optimizer, run_dir=run_dir, monitor=False):
        for step in range(64):
            if step in (12, 24):
                saved[step] = [
                    (_local(p), {k: _local(v) for k, v in optimizer.state[p].items()}) for p in model.parameters()
                ]
            if step == 30:
                for p, (values, state) in zip(model.parameters(), saved[12 if apart and rank else 24], strict=True):
                    with torch.no_grad():
                        p.to_local().copy_(values)  # type: ignore[attr-defined]
                    for name, held in state.items():
                        _local(optimizer.state[p][name], copied=False).copy_(held)
            x = torch.randn(16, 16, generator=made)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x.roll(1, 1)).backward()
            optimizer.step()


def _local(tensor: torch.Tensor, *, copied: bool = True) -> torch.Tensor:
    held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return held.detach().clone() if copied else held.detach()
