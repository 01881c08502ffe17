"""One process, no process group, gradient accumulation: steps are seen through the optimizer all the same."""

from __future__ import annotations

import argparse

import torch
from torch import nn

import dtobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches a step")
    parser.add_argument("--run-dir", default=None, help="default: runs/<time>-<name>")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    with dtobs.attach(model, optimizer, run_dir=options.run_dir) as session:
        for step in range(1, options.steps + 1):
            for _ in range(options.accumulate):
                inputs = torch.randn(32, 16)
                loss = nn.functional.mse_loss(model(inputs), inputs.sin().sum(dim=1, keepdim=True))
                (loss / options.accumulate).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0:
                print(f"step {step} loss {loss.item():.4f}")
        print(f"read it with: dtobs diagnose {session.run_dir}")


if __name__ == "__main__":
    main()
