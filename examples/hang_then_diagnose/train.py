"""A DDP loop whose data loader on one rank never returns, as a stuck network file system does."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import dtobs


def next_batch(step: int, blocked: bool) -> tuple[Tensor, Tensor]:
    """Inputs [32, 16] and targets [32, 1]; when blocked it reads a pipe nobody writes to."""
    if blocked:
        fifo = Path(tempfile.mkdtemp()) / "shard-00042.bin"
        os.mkfifo(fifo)
        fifo.read_bytes()
    inputs = torch.randn(32, 16)
    return inputs, inputs.sum(dim=1, keepdim=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--hang-at", type=int, default=10, help="the step at which it blocks; 0: never")
    parser.add_argument("--hang-rank", type=int, default=1)
    parser.add_argument("--hang-timeout", type=float, default=5.0, help="seconds without progress that are a hang")
    parser.add_argument("--run-dir", default=None, help="default: runs/<time>-<name>")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(16, 1))
    torch.manual_seed(rank)  # from here on every rank draws its own samples
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    with dtobs.attach(model, optimizer, run_dir=options.run_dir, hang_timeout=options.hang_timeout) as session:
        if rank == 0:
            print(f"run directory: {session.run_dir}", flush=True)
        for step in range(1, options.steps + 1):
            with session.phase("data"):
                inputs, targets = next_batch(step, blocked=step == options.hang_at and rank == options.hang_rank)
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
