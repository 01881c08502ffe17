"""Diagnosing Flight Recorder dumps: CPU seconds and peak memory of dtobs and of others on the same files.

    python -m tests.benchmarks.flight_recorder --ranks 64 256 1024
    python -m tests.benchmarks.flight_recorder --ranks 16384 --entries 500 --no-peer
    python -m tests.benchmarks.flight_recorder --ranks 1024 --no-peer --against OTHER_CHECKOUT --rounds 3

Measured on 2 busy cores at 2,000 entries a rank: 1,024 ranks take 12.5 CPU seconds and 0.31 GB (the unpickler 6.0 s),
256 ranks 3.6 s and 0.10 GB (torchfrtrace 17.2 s and 1.12 GB). 16,384 ranks at 500 entries, 3.3 GB of dumps, take 114
CPU seconds (93 of them in the two children that read) and 1.03 GB; the dumps are never in memory together, their
columns are.

"unpickler" is `pickle.load` of each file and nothing else: what reading costs before anything is known of it.

Each tool runs in a process of its own, its children counted with it. In the job one rank does not join. Its groups are
the world, data and tensor parallel; with --pipeline also pipeline parallel, where the peer stops early ("too many
mismatches", at plain sends and receives), so that its cost says nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from dtobs.testing.layout import JobLayout, step_of
from dtobs.testing.simulate import SimulatedFault
from dtobs.testing.synthetic_dumps import SimulatedJob, write_dumps

_OURS = """
import sys
from pathlib import Path
from dtobs.flight_recorder import analyse_dumps, load_dumps
for finding in analyse_dumps(load_dumps(Path(sys.argv[1]))).findings:
    print(finding.code, finding.ranks)
"""
_PEER = """
import sys
from torch.distributed.flight_recorder.fr_trace import main
main([sys.argv[1], "--prefix", "nccl_trace_rank_"])
"""
_BARE = """
import pathlib, pickle, sys
for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    with path.open("rb") as file:
        pickle.load(file)
"""
# Runs the tool as its only child, so that what RUSAGE_CHILDREN says is the tool's, with all it started.
_MEASURE = """
import json, resource, subprocess, sys, time
begin = time.monotonic()
done = subprocess.run(sys.argv[2:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
with open(sys.argv[1], "w") as out:
    json.dump({"wall_seconds": time.monotonic() - begin, "cpu_seconds": used.ru_utime + used.ru_stime,
               "peak_bytes": used.ru_maxrss * 1024, "returncode": done.returncode, "output": done.stdout[-300:]}, out)
"""


@dataclass(frozen=True)
class Cost:
    """What one tool used. `peak_bytes`: of its largest process."""

    wall_seconds: float
    cpu_seconds: float
    peak_bytes: int
    returncode: int
    output: str


def layout_of(ranks: int, *, pipeline: bool) -> JobLayout:
    """Tensor parallel 8 where it fits, pipeline parallel 4 if asked for, the rest data parallel."""
    tp = 8 if ranks % 32 == 0 else 2
    pp = 4 if pipeline else 1
    return JobLayout(dp=ranks // (tp * pp), tp=tp, pp=pp, layers=4, micro_batches=4)


def measure(code: str, folder: Path, checkout: Path | None = None) -> Cost:
    """Run `code` on `folder` in a process of its own, with the dtobs of `checkout` where one is given."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "cost.json"
        command = [sys.executable, "-c", _MEASURE, str(report), sys.executable, "-c", code, str(folder)]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([*([str(checkout)] if checkout else []), *(p for p in sys.path if p)]),
        }
        subprocess.run(command, check=True, env=environment, cwd=checkout)
        return Cost(**json.loads(report.read_text()))


def compare(
    ranks: int, entries: int, folder: Path, *, peer: bool, pipeline: bool, against: Path | None = None, rounds: int = 1
) -> dict[str, Cost]:
    """Write the dumps of one job and let the tools at them, one after the other; of several rounds the median."""
    target = folder / str(ranks)
    layout = layout_of(ranks, pipeline=pipeline)
    # As many steps as the ring holds: on rings that have wrapped the peer stops at differences that are none.
    steps = entries // max(len(step_of(layout, stage).calls) for stage in range(layout.pp))
    job = SimulatedJob(layout, SimulatedFault("rank-not-joined", ranks // 3, "dp"), entries=entries, steps=steps)
    with ProcessPoolExecutor(1) as pool:  # the generator's memory is not ours
        pool.submit(write_dumps, job, target).result()
    tools: dict[str, tuple[str, Path | None]] = {"dtobs": (_OURS, None), "unpickler": (_BARE, None)}
    if against is not None:
        tools["against"] = (_OURS, against.absolute())
    if peer:
        tools["torchfrtrace"] = (_PEER, None)
    costs: dict[str, list[Cost]] = {name: [] for name in tools}
    for number in range(rounds):
        for name in list(tools) if number % 2 == 0 else reversed(tools):
            costs[name].append(measure(tools[name][0], target, tools[name][1]))
    return {name: sorted(found, key=lambda c: c.cpu_seconds)[len(found) // 2] for name, found in costs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--entries", type=int, default=2000)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--pipeline", action="store_true", help="with sends and receives, at which the peer gives up")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="measure the dtobs there as well")
    parser.add_argument("--rounds", type=int, default=1, help="how often each is measured, in turns")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.nice(10)
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            begin = time.monotonic()
            costs = compare(
                ranks,
                args.entries,
                Path(folder),
                peer=not args.no_peer,
                pipeline=args.pipeline,
                against=args.against,
                rounds=args.rounds,
            )
            took = time.monotonic() - begin
        if args.json:
            print(json.dumps({"ranks": ranks, "entries": args.entries} | {n: asdict(c) for n, c in costs.items()}))
            continue
        print(f"{ranks} ranks × {args.entries} entries (all took {took:.0f} s)")
        for name, cost in costs.items():
            print(
                f"  {name:<13}{cost.cpu_seconds:8.1f} CPU s {cost.wall_seconds:8.1f} s {cost.peak_bytes / 1e9:6.2f} GB"
                f"  → {cost.output.strip().splitlines()[-1] if cost.output.strip() else cost.returncode}"
            )
        if "torchfrtrace" in costs:
            ours, theirs = costs["dtobs"], costs["torchfrtrace"]
            print(
                f"  ratio        {theirs.cpu_seconds / ours.cpu_seconds:8.1f}×{'':15}"
                f"{theirs.peak_bytes / ours.peak_bytes:6.1f}×"
            )


if __name__ == "__main__":
    main()
