"""`dtobs trace` beside Holistic Trace Analysis on the same files: seconds, processor seconds and memory of each.

`python -m tests.benchmarks.trace [--kernels N] [--ranks N] [--hta PYTHON]`; PYTHON is an interpreter that has the
package. Both read the traces and give the breakdown of time and the overlap of every rank.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

from tests.unit.timeline.kineto.traces import random_rank, save

_HTA = """
import sys
from hta.trace_analysis import TraceAnalysis
t = TraceAnalysis(trace_dir=sys.argv[1])
t.get_temporal_breakdown(visualize=False)
t.get_comm_comp_overlap(visualize=False)
"""
_OURS = [sys.executable, "-m", "dtobs", "trace", "--json"]


def generate(folder: Path, kernels: int, ranks: int) -> int:
    """Write the traces, with four operators of the host to a kernel as real ones have; returns their bytes."""
    hosts = {}
    for rank in range(ranks):
        host = random_rank(rank, kernels)
        host.meta["distributedInfo"] = {"rank": rank, "world_size": ranks}
        for number in range(4 * kernels):
            name = f"aten::operator_{number % 97}"
            host.add("cpu_op", name, 1000 + 7 * number, 5, **{"External id": number, "Ev Idx": number})
        hosts[rank] = host
    save(hosts, folder)
    return sum(p.stat().st_size for p in folder.iterdir())


def measured(command: list[str]) -> tuple[float, float, float]:
    """Wall seconds, processor seconds and the largest process in megabytes."""
    begin = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode not in (0, 3):
        raise SystemExit(f"{command[:4]} failed: {child.returncode}")
    return time.perf_counter() - begin, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hta", metavar="PYTHON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # In a process of its own: a child starts with its parent's size as its largest.
        with get_context("spawn").Pool(1) as pool:
            size = pool.apply(generate, (Path(folder), args.kernels, args.ranks))
        print(f"{args.ranks} traces, {size / 1e6:.0f} MB")
        rows = {"dtobs": [*_OURS, folder]}
        if args.hta:
            rows["HTA"] = [args.hta, "-c", _HTA, folder]
        for name, command in rows.items():
            wall, used, memory = measured(command)
            print(f"{name:>6}: {wall:7.1f} s, {used:7.1f} s of processor, {memory:6.0f} MB")


if __name__ == "__main__":
    main()
