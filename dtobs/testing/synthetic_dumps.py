"""Synthetic dumps of any number of ranks: a 3-D job (data × tensor × pipeline parallel) with a fault, two, or none.

The public fake of the real recorder, at the same seam: what it yields is what ``pickle.load`` of a real NCCL dump
yields. The last steps are simulated call by call (``simulate``), everything older is filled in as completed.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtobs.testing.layout import WORLD, JobLayout, Step, step_of
from dtobs.testing.simulate import Issued, SimulatedFault, SimulatedRun, simulate

VERSION = "2.10"
START_NS = 1_790_000_000_000_000_000
STEP_NS = 1_000_000_000
CALL_NS = 1_000_000
TIMEOUT_MS = 600_000


@dataclass(frozen=True)
class SimulatedJob:
    """What to make dumps of. `entries`: the ring's size; `steps`: how many the job did before the dump.

    `timing`: whether the devices note when they start a call, which in real jobs TORCH_NCCL_ENABLE_TIMING turns on;
    `run_ahead`: how many calls a host issues beyond the one that its device is in.
    """

    layout: JobLayout
    fault: SimulatedFault | None = None
    second: SimulatedFault | None = None
    entries: int = 2000
    steps: int = 40
    simulated_steps: int = 3
    stacks: bool = True
    clock_skew_ns: dict[int, int] = field(default_factory=dict)
    timing: bool = True
    run_ahead: int = 0

    @property
    def faults(self) -> tuple[SimulatedFault, ...]:
        """All that is wrong with it."""
        return tuple(fault for fault in (self.fault, self.second) if fault is not None)

    @property
    def expected(self) -> tuple[str, tuple[int, ...]] | None:
        """The verdict that is right on its (first) fault: code and ranks; None for a healthy job."""
        if self.fault is None:
            return None
        if self.fault.name == "device-stopped" and not self.timing:
            return "network-stalled", ()  # nothing tells whose device never came to the call
        return self.fault.expected(self.layout)


def dumps_of(job: SimulatedJob) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (rank, dump) of every rank that left one, one at a time."""
    if job.steps < job.simulated_steps:
        raise ValueError(f"a job of {job.steps} steps cannot have {job.simulated_steps} simulated ones")
    layout = job.layout
    outcome = simulate(layout, job.faults, job.simulated_steps, job.run_ahead)
    gone = {fault.rank for fault in job.faults if fault.name == "dumps-missing"}
    writers = [_Writer(job, step_of(layout, stage)) for stage in range(layout.pp)]
    for rank in sorted(set(range(layout.world_size)) - gone):
        yield rank, writers[layout.stage(rank)].dump(rank, outcome)


def write_dumps(job: SimulatedJob, folder: Path, prefix: str = "nccl_trace_rank_") -> None:
    """Write every rank's dump as a pickle, as PyTorch names them."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, dump in dumps_of(job):
        (folder / f"{prefix}{rank}").write_bytes(pickle.dumps(dump, protocol=2))


class _Writer:
    """Writes the dumps of one pipeline stage's ranks; what they share is built once."""

    def __init__(self, job: SimulatedJob, step: Step) -> None:
        self.job = job
        self.step = step
        self.frames: dict[str, list[dict[str, Any]]] = {}
        self.world = ""
        # Of the rank whose dump is being written: its groups' names and descriptions, and its place in each.
        self.groups: dict[str, tuple[str, str]] = {}
        self.place: dict[str, int] = {}
        self.before = job.steps - job.simulated_steps
        # How often each group is used in a step, collectives and pairs apart.
        self.per_step: dict[tuple[str, bool], int] = {}
        for call in step.calls:
            key = (call.axis, call.peer_offset != 0)
            self.per_step[key] = self.per_step.get(key, 0) + 1

    def dump(self, rank: int, outcome: SimulatedRun) -> dict[str, Any]:
        """The dump of one rank."""
        layout, job = self.job.layout, self.job
        issued = outcome.issued[rank]
        self.groups = {axis: (layout.group_name(rank, axis), layout.description(axis)) for axis in layout.axes}
        self.place = {axis: layout.members(rank, axis).index(rank) for axis in layout.axes}
        total = self.before * len(self.step.calls) + len(issued)
        first = max(0, total - job.entries)
        counters: dict[tuple[str, bool], int] = {}
        entries: list[dict[str, Any]] = []
        step_length = len(self.step.calls)
        start_step = min(first // step_length, self.before) if step_length else 0
        for key, uses in self.per_step.items():
            counters[key] = uses * start_step
        record = start_step * step_length
        for step in range(start_step, self.before):
            for call in self.step.calls:
                made = Issued(call, "completed")
                self._append(entries, rank, made, record, first, counters, step)
                record += 1
        for made in issued:
            self._append(entries, rank, made, record, first, counters, self.before + made.step)
            record += 1
        return {
            "version": VERSION,
            "comm_lib_version": "2.27.5",
            "pg_config": {
                name: {"name": name, "desc": description, "ranks": self._ranks(rank, axis)}
                for axis, (name, description) in self.groups.items()
            },
            "pg_status": {},
            "entries": entries,
        }

    def _ranks(self, rank: int, axis: str) -> str:
        """The text of a group's ranks; that of the world is long, and the same in every dump."""
        layout = self.job.layout
        if axis != WORLD:
            return str(layout.members(rank, axis))
        self.world = self.world or str(layout.members(rank, WORLD))
        return self.world

    def _append(
        self,
        entries: list[dict[str, Any]],
        rank: int,
        made: Issued,
        record: int,
        first: int,
        counters: dict[tuple[str, bool], int],
        step: int,
    ) -> None:
        call, layout = made.call, self.job.layout
        pair = call.peer_offset != 0
        key = (call.axis, pair)
        counters[key] = counters.get(key, 0) + 1
        if record < first:
            return
        name = call.operation
        if pair:
            me = self.place[call.axis]
            arrow = "->" if name == "send" else "<-"
            name = f"{name} {me}{arrow}{me + call.peer_offset}"
        created = START_NS + step * STEP_NS + record * CALL_NS + self.job.clock_skew_ns.get(rank, 0)
        state = made.state if self.job.timing or made.state != "started" else "scheduled"
        timed = self.job.timing and state != "scheduled"
        entry: dict[str, Any] = {
            "record_id": record,
            "pg_id": layout.axes.index(call.axis),
            "process_group": self.groups[call.axis],
            "collective_seq_id": counters.get((call.axis, False), 0),
            "p2p_seq_id": counters.get((call.axis, True), 0),
            "op_id": record + 1,
            "profiling_name": f"nccl:{name}",
            "time_created_ns": created,
            "input_sizes": [list(call.size)],
            "input_dtypes": [call.dtype],
            "output_sizes": [list(call.size)],
            "output_dtypes": [call.dtype],
            "state": state,
            "time_discovered_started_ns": created + CALL_NS // 4 if timed else None,
            "time_discovered_completed_ns": created + CALL_NS // 2 if state == "completed" else None,
            "retired": state == "completed",
            "timeout_ms": TIMEOUT_MS,
            "is_p2p": pair,
        }
        if self.job.stacks:
            entry["frames"] = self._stack(call.site)
        entries.append(entry)

    def _stack(self, site: str) -> list[dict[str, Any]]:
        if site not in self.frames:
            file, line, name = site.split(":")
            self.frames[site] = [
                {
                    "name": "all_reduce",
                    "filename": "/env/site-packages/torch/distributed/distributed_c10d.py",
                    "line": 3245,
                },
                {"name": "wrapper", "filename": "/env/site-packages/torch/distributed/c10d_logger.py", "line": 83},
                {"name": name, "filename": f"/app/{file}", "line": int(line)},
                {"name": "train_step", "filename": "/app/train.py", "line": 120},
                {"name": "main", "filename": "/app/train.py", "line": 310},
                {"name": "<module>", "filename": "/app/train.py", "line": 344},
            ]
        return self.frames[site]
