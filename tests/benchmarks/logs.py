"""Reading console logs: processor seconds a gigabyte beside `grep`, on logs of many ranks that trained well.

    python -m tests.benchmarks.logs [--ranks 1000] [--kilobytes 100] [--json]

The lines are those of real jobs: progress, NCCL's channels, warnings, and half of them words of the program's own.
`grep -c` for one word reads the same files before and after.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

from dtobs.diagnose import diagnose_logs

_WORDS = [
    "loading",
    "shard",
    "checkpoint",
    "epoch",
    "tokens",
    "cache",
    "worker",
    "fetch",
    "data",
    "sample",
    "batch",
    "mask",
    "attention",
    "layer",
    "dtype",
]


def write_logs(folder: Path, ranks: int, size: int) -> int:
    """Write one log a rank of about `size` bytes; gives the bytes of all."""
    random = Random(1)
    total = 0
    for rank in range(ranks):
        lines: list[str] = []
        written = 0
        while written < size:
            lines.append(_line(random, rank, len(lines)))
            written += len(lines[-1]) + 1
        (folder / f"rank_{rank}.log").write_text("\n".join(lines) + "\n")
        total += written
    return total


def _line(random: Random, rank: int, number: int) -> str:
    kind = random.random()
    head = f"[rank{rank}]: 2026-11-20 12:{number // 60 % 60:02}:{number % 60:02},123 - INFO - "
    if kind < 0.35:
        loss, norm, speed = 4 - number / 1e5, random.random(), random.randint(5000, 6000)
        return f"{head}step {number} loss {loss:.4f} grad_norm {norm:.3f} lr 3.00e-04 tokens/s {speed}"
    if kind < 0.5:
        channel = f"{random.randint(0, 31):02}/0 : {rank}[{rank % 8}] -> {rank + 1}[{(rank + 1) % 8}]"
        return (
            f"node{rank // 8}:{10000 + rank}:{10100 + rank} [{rank % 8}] NCCL INFO Channel {channel} via P2P/CUMEM/read"
        )
    if kind < 0.55:
        return f"[rank{rank}]: /usr/lib/python3/site-packages/torch/utils/checkpoint.py:295: FutureWarning: deprecated."
    return head + " ".join(random.choice(_WORDS) for _ in range(random.randint(4, 18)))


def measure(ranks: int, size: int) -> dict[str, Any]:
    """Processor seconds a gigabyte of both."""
    with tempfile.TemporaryDirectory() as root:
        total = write_logs(Path(root), ranks, size)
        grep = min(_grep(root), _grep(root))
        began = time.process_time()
        found = diagnose_logs([root])
        ours = time.process_time() - began
        grep = min(grep, _grep(root))
    return {
        "ranks": found.world_size,
        "bytes": total,
        "findings": len(found.findings),
        "seconds_per_gigabyte": ours / total * 1e9,
        "grep_seconds_per_gigabyte": grep / total * 1e9,
    }


def _grep(root: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(["grep", "-rcE", "error|Traceback|timeout", root], stdout=subprocess.DEVNULL, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--kilobytes", type=int, default=100, help="of each rank's log")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = measure(args.ranks, args.kilobytes * 1000)
    if args.json:
        print(json.dumps(found))
        return
    print(f"{found['ranks']} ranks, {found['bytes'] / 1e6:.0f} MB, {found['findings']} findings")
    print(f"dtobs diagnose: {found['seconds_per_gigabyte']:.1f} CPU s/GB")
    print(f"grep:           {found['grep_seconds_per_gigabyte']:.1f} CPU s/GB")


if __name__ == "__main__":
    main()
