"""What the monitor costs: ``python -m tests.benchmarks.monitor [--ranks 8] [--seconds 30] [--json]``.

Simulated ranks do ten steps a second beside a real monitor process; its processor time (start-up apart), its memory and
the time until it served are read from /proc. One core is 100 %.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dtobs.host.process import read_process
from dtobs.monitor.address import addresses
from dtobs.recording.rundir import RunDirectory
from dtobs.testing.fake_run import FakeRun

_TICK = 0.1


def measure(ranks: int, seconds: float) -> dict[str, float]:
    """Processor share, memory in MB and seconds (wall and processor) until the monitor serves."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        run = FakeRun(root, world=ranks, ranks_per_node=ranks)
        run.steps(200)
        begin = time.monotonic()
        monitor = subprocess.Popen([sys.executable, "-m", "dtobs.monitor", str(root)], stderr=subprocess.DEVNULL)
        try:
            while 0 not in addresses(RunDirectory(root)):
                time.sleep(0.01)
            wall, start = time.monotonic() - begin, read_process(monitor.pid).cpu_seconds
            train(run, seconds)
            state = read_process(monitor.pid)
        finally:
            monitor.terminate()
            monitor.wait()
    return {
        "ranks": ranks,
        "start_seconds": wall,
        "start_cpu_seconds": start,
        "cpu_share": (state.cpu_seconds - start) / seconds,
        "rss_mb": state.rss_bytes / 1e6,
    }


def train(run: FakeRun, seconds: float) -> None:
    """Every rank does a step and a collective each tick."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for rank in run.ranks:
            rank.clock_ns = time.monotonic_ns() - 100_000_000
            rank.step().collective("all_reduce")
        time.sleep(_TICK)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    result = measure(args.ranks, args.seconds)
    if args.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:>18} {value:.4g}")


if __name__ == "__main__":
    main()
