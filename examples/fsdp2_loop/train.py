"""The same for FSDP2 (`fully_shard`), with a named validation phase."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dtobs


class Block(nn.Module):
    """Pre-norm residual MLP: x_BD → x_BD."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_BD: Tensor) -> Tensor:
        return x_BD + self.down(nn.functional.gelu(self.up(self.norm(x_BD))))


def batch(generator: torch.Generator, size: int, width: int) -> tuple[Tensor, Tensor]:
    """Inputs [size, width] and the targets they determine [size, width]."""
    inputs = torch.randn(size, width, generator=generator)
    return inputs, inputs.roll(1, dims=1).tanh()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--run-dir", default=None, help="default: runs/<time>-<name>")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, width = dist.get_rank(), 64
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(3)))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    own_data = torch.Generator().manual_seed(100 + rank)  # every rank draws its own samples

    with dtobs.attach(model, optimizer, mesh=mesh, run_dir=options.run_dir) as session:
        for step in range(1, options.steps + 1):
            inputs, targets = batch(own_data, 32, width)
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 20 == 0:
                with session.phase("validation"), torch.no_grad():
                    inputs, targets = batch(torch.Generator().manual_seed(9), 64, width)
                    validation = nn.functional.mse_loss(model(inputs), targets)
                if rank == 0:
                    print(f"step {step} loss {loss.item():.4f} validation {validation.item():.4f}")
        if rank == 0:
            print(f"read it with: dtobs diagnose {session.run_dir}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
