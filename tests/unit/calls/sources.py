"""The same job as its console and as NCCL RAS tell it: less evidence than a recording or a dump holds."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from math import prod
from pathlib import Path
from random import Random
from typing import Any

from dtobs.diagnose import diagnose_logs
from dtobs.findings import Finding
from dtobs.host.stacks import Frame
from dtobs.ras import judge, read_samples
from dtobs.stacks import RankStack
from dtobs.stacks import judge as judge_stacks
from dtobs.testing.layout import PIPE, step_of
from dtobs.testing.simulate import Issued, simulate
from dtobs.testing.synthetic_dumps import SimulatedJob
from tests.unit.logs.generator import dump_signal, status, steps, work, write

VERSION = "2.5"
_IN_LOGS = {"all_reduce": "ALLREDUCE", "broadcast": "BROADCAST", "all_gather": "_ALLGATHER_BASE"}
_IN_RAS = {"all_reduce": "AllReduce", "broadcast": "Broadcast", "all_gather": "AllGather"}


def collectives(job: SimulatedJob) -> list[dict[str, list[Issued]]]:
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


def from_console(job: SimulatedJob, folder: Path) -> Finding | None:
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


def from_ras(job: SimulatedJob, folder: Path, samples: int = 2) -> Finding | None:
    """What RAS counts: launches of each operation by each rank of a communicator. A job with a fault stands still."""
    folder.mkdir(parents=True)
    for number in range(samples):
        now = job if job.faults else replace(job, steps=job.steps + number)
        (folder / f"sample{number}.json").write_text(json.dumps(_ras_answer(now)))
    findings, _ = judge(read_samples(folder))
    return next(iter(findings), None)


def _ras_answer(job: SimulatedJob) -> dict[str, Any]:
    layout = job.layout
    counts: dict[str, dict[int, Counter[str]]] = {}
    pids: dict[str, dict[int, int]] = {}
    for rank, by_axis in enumerate(collectives(job)):
        for axis, calls in by_axis.items():
            place = layout.members(rank, axis).index(rank)
            launched = Counter(_IN_RAS[one.call.operation] for one in calls)
            counts.setdefault(layout.group_name(rank, axis), {})[place] = launched
            pids.setdefault(layout.group_name(rank, axis), {})[place] = 1000 + rank
        if layout.pp > 1:
            name, place = layout.group_name(rank, PIPE), layout.members(rank, PIPE).index(rank)
            counts.setdefault(name, {})[place] = Counter({"Send": job.steps, "Recv": job.steps})
            pids.setdefault(name, {})[place] = 1000 + rank
    return {
        "nccl_version": "2.28.7",
        "communicators": [
            {
                "hash": f"0x{int(name):x}",
                "size": len(ranks),
                "missing_ranks": [],
                "ranks": [
                    {
                        "rank": place,
                        "host": "a",
                        "pid": pids[name][place],
                        "cuda_dev": 0,
                        "collective_counts": dict(made),
                    }
                    for place, made in ranks.items()
                ],
            }
            for name, ranks in counts.items()
        ],
        "ras": {},
    }


def from_stacks(job: SimulatedJob, folder: Path, *, still: bool | None = True) -> Finding | None:
    """What the Python stacks of all ranks show: the line each is at, and nothing of groups, sizes or numbers."""
    library = "/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
    stacks = []
    for rank, issued in enumerate(simulate(job.layout, job.faults, job.simulated_steps, job.run_ahead).issued):
        blocked = next((made.call for made in issued if made.state != "completed"), None)
        if blocked is None:
            frames = (Frame("/home/me/train.py", 99, "elsewhere"),)
            done = job.fault is None or len(issued) == len(_program(job, rank))
            if done:
                continue  # it did all of its steps and ended
        else:
            file, line, name = blocked.site.split(":")
            frames = (Frame(library, 2000, blocked.operation), Frame(f"/home/me/{file}", int(line), name))
        stacks.append(RankStack(rank, frames, still=still))
    findings, _ = judge_stacks(stacks, job.layout.world_size)
    return next(iter(findings), None)


def _program(job: SimulatedJob, rank: int) -> list[Issued]:
    """What a rank would issue if nothing were wrong."""
    return simulate(job.layout, (), job.simulated_steps, job.run_ahead).issued[rank]
