"""What reading ahead costs and gives on a CPU: `python -m tests.benchmarks.prefetch [--pairs N] [--cold]`.

One rank trains the debug model; blocks of steps that read when they need and blocks that read one micro-batch ahead
alternate, and each pair gives a ratio. With `--cold` the token file leaves the page cache before every block, so that
there is a disk to wait for. Process CPU counts the thread that reads.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from runtime import flags, loop, mesh, plan, trainer
from runtime.data.loader import ShardedLoader
from runtime.data.tokens import prepare
from runtime.trainer import make_trainer
from tests.harness import run_ranks

SETTINGS = (
    *("--preset", "debug", "--data.sequence", "128", "--data.batch", "4", "--data.validate_every", "0"),
    *("--steps", "1000000", "--device", "cpu"),
)
STEPS = 10  # a block


def measure(rank: int, world: int, folder: str, pairs: int, cold: bool) -> list[list[tuple[float, float]]]:
    """Wall and CPU seconds a step: [pair][without, ahead]."""
    path = Path(folder) / "tokens.npy"
    config = flags.load((*SETTINGS, "--data.path", str(path), "--data.cache", f"{folder}/cache"), {})
    layout = plan.resolve(config, world)
    files = prepare(config)
    made = make_trainer(config, layout, mesh.build(layout, "cpu"), torch.device("cpu"), files, Path(folder))
    plain, ahead = (ShardedLoader(files.training, sequence=128, batch=4, seed=1, ahead=depth) for depth in (0, 1))
    results: list[list[tuple[float, float]]] = []
    for pair in range(pairs + 1):
        row = []
        for loader in (plain, ahead) if pair % 2 else (ahead, plain):
            made.loader = loader
            if cold:
                forget(files.folder / "training.bin")
            row.append(block(made))
        results.append(row if pair % 2 else row[::-1])
    return results[1:]  # the first warms up


def block(made: trainer.Trainer) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(STEPS):
        made.step += 1
        loop.update(made, made.step, loop.forward_and_backward(made))
    return (time.perf_counter() - wall) / STEPS, (time.process_time() - cpu) / STEPS


def forget(path: Path) -> None:
    """Drop a file from the page cache; mapped pages that were touched stay until they are unmapped."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=50_000_000)
    parser.add_argument("--cold", action="store_true")
    asked = parser.parse_args()
    with TemporaryDirectory() as folder:
        np.save(f"{folder}/tokens.npy", np.random.default_rng(0).integers(0, 500, asked.tokens, np.uint16))
        (result,) = run_ranks(measure, 1, folder, asked.pairs, asked.cold, timeout=3600)
    pairs: Any = np.array(result.value)  # [pair, without or ahead, wall or CPU]
    for place, name in enumerate(("wall", "process CPU")):
        low, middle, high = np.quantile(pairs[:, 1, place] / pairs[:, 0, place], [0.05, 0.5, 0.95])
        without = np.median(pairs[:, 0, place]) * 1e3
        print(f"{name}: {without:.1f} ms a step; reading ahead x {middle:.3f} (5-95 %: {low:.3f}-{high:.3f})")


if __name__ == "__main__":
    main()
