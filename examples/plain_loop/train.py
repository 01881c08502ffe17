"""A hand-written DDP loop; the three lines with `dtobs` are all it takes to observe it."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import dtobs  # line 1


def dataset() -> TensorDataset:
    """4,096 points of a noisy linear map, the same on every rank; the sampler gives each rank its share."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(4096, 32, generator=generator)
    noise = torch.randn(4096, 1, generator=generator)
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True) + 0.1 * noise)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--run-dir", default=None, help="default: runs/<time>-<name>")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = dataset()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64, sampler=sampler)

    with dtobs.attach(model, optimizer, run_dir=options.run_dir) as session:  # line 2
        for epoch in range(options.epochs):
            sampler.set_epoch(epoch)
            for inputs, targets in loader:
                loss = nn.functional.mse_loss(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if dist.get_rank() == 0:
                print(f"epoch {epoch} loss {loss.item():.4f}")
        if dist.get_rank() == 0:
            print(f"read it with: dtobs diagnose {session.run_dir}")  # line 3

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
