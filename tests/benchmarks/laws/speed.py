"""What recomputation costs in time, and how well two replicas scale: CPU and wall seconds of interleaved turns."""

from __future__ import annotations

import gc
import time

import torch.distributed as dist

from tests.benchmarks import training
from tests.benchmarks.peers.measure import Turn


def turns(rank: int, ranks: int, variants: dict[str, tuple[str, ...]], rounds: int, steps: int) -> list[Turn]:
    """Turns of trainings with the flags of each variant, one after the other, in every round."""
    made = {name: training.from_flags(flags) for name, flags in variants.items()}
    found = []
    for number in range(rounds):
        for name, trainer in made.items():
            training.go_on(trainer, 1)  # warms the caches again
            gc.collect()
            dist.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            training.go_on(trainer, steps)
            found.append(Turn(name, number, time.process_time() - cpu, time.perf_counter() - wall))
    return found
