"""A rank that trains a small DDP model until the file STOP appears beside its run directory; run by torchrun."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import dtobs


def main() -> None:
    stop = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Linear(256, 64))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with dtobs.attach(model, optimizer, hang_timeout=float(os.environ["HANG_TIMEOUT"])):
        done = torch.zeros(1)
        while not done.item():
            model(torch.randn(4, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.05)
            done.fill_(stop.exists())
            dist.all_reduce(done, op=dist.ReduceOp.MAX)
    time.sleep(0.5)  # Gloo's threads still drop their work, see CONTRIBUTING
    os._exit(0)


if __name__ == "__main__":
    main()
