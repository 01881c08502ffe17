"""The same job as its console and as NCCL RAS tell it: less evidence than a recording or a dump holds."""

from __future__ import annotations

import json
from collections import Counter
from math import prod
from pathlib import Path
from random import Random

from dtobs.diagnose import diagnose_logs
from dtobs.findings import Finding
from dtobs.ras import judge, read_samples
from dtobs.testing.layout import step_of
from dtobs.testing.simulate import Issued, simulate
from dtobs.testing.synthetic_dumps import Job
from tests.unit.logs.generator import dump_signal, status, steps, work, write

VERSION = "2.5"
_IN_LOGS = {"all_reduce": "ALLREDUCE", "broadcast": "BROADCAST", "all_gather": "_ALLGATHER_BASE"}
_IN_RAS = {"all_reduce": "AllReduce", "broadcast": "Broadcast", "all_gather": "AllGather"}


def collectives(job: Job) -> list[dict[str, list[Issued]]]:
    """Of every rank, by axis, all collectives of the job in order."""
    layout, before = job.layout, job.steps - job.simulated_steps
    found: list[dict[str, list[Issued]]] = []
    for rank, issued in enumerate(simulate(layout, job.faults, job.simulated_steps, job.run_ahead).issued):
        calls = step_of(layout, layout.stage(rank)).calls
        by_axis: dict[str, list[Issued]] = {}
        for made in [*(Issued(call, "completed") for _ in range(before) for call in calls), *issued]:
            if not made.call.peer_offset:
                by_axis.setdefault(made.call.axis, []).append(made)
        found.append(by_axis)
    return found


def from_console(job: Job, folder: Path) -> Finding | None:
    """What watchdogs print: of ranks that wait for too long the call, of the others how far they came in the world."""
    layout, made = job.layout, collectives(job)
    lines = {rank: steps(rank) for rank in range(layout.world_size)}
    waiting: dict[int, tuple[str, int]] = {}
    for rank, by_axis in enumerate(made):
        for axis, calls in by_axis.items():
            stuck = next((n for n, one in enumerate(calls, 1) if one.state != "completed"), None)
            if stuck is not None and (rank not in waiting):
                waiting[rank] = (axis, stuck)
    for rank, by_axis in enumerate(made if waiting else []):
        if rank not in waiting:
            done = len(by_axis["world"])
            lines[rank] += dump_signal(VERSION, rank, min(waiting), done, done)
            continue
        axis, seq = waiting[rank]
        place = layout.members(rank, axis).index(rank)
        call, issued = by_axis[axis][seq - 1].call, len(by_axis[axis])
        lines[rank].append(work(VERSION, rank, seq, _IN_LOGS[call.operation], prod(call.size), place))
        lines[rank] += status(VERSION, rank, seq, issued, seq - 1, layout.group_name(rank, axis), place)
    folder.mkdir(parents=True)
    return diagnose_logs(write(folder, "files", lines, [], Random(1))).verdict


def from_ras(job: Job, folder: Path, samples: int = 2) -> Finding | None:
    """What RAS counts: launches of each operation by each rank of a communicator. A job that stands still, twice."""
    layout = job.layout
    counts: dict[str, dict[int, Counter[str]]] = {}
    for rank, by_axis in enumerate(collectives(job)):
        for axis, calls in by_axis.items():
            place = layout.members(rank, axis).index(rank)
            launched = Counter(_IN_RAS[one.call.operation] for one in calls)
            counts.setdefault(layout.group_name(rank, axis), {})[place] = launched
    answer = {
        "nccl_version": "2.28.7",
        "communicators": [
            {
                "hash": f"0x{int(name):x}",
                "size": len(ranks),
                "missing_ranks": [],
                "ranks": [{"rank": place, "collective_counts": dict(launched)} for place, launched in ranks.items()],
            }
            for name, ranks in counts.items()
        ],
        "ras": {},
    }
    folder.mkdir(parents=True)
    for number in range(samples):
        (folder / f"sample{number}.json").write_text(json.dumps(answer))
    findings, _ = judge(read_samples(folder))
    return next(iter(findings), None)
