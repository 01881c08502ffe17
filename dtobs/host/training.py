"""The training processes of this host, found by what launchers put into their environment.

torchrun, Accelerate and DeepSpeed set RANK and WORLD_SIZE, srun and mpirun variables of their own. Loader workers and
helpers inherit them: of processes with one rank of one job, the topmost is the rank. What multiprocessing spawned has
no rank of its own and is numbered in the order in which it began.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from dtobs.host.process import process_ids, start_ticks

_RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_WORLD = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
_JOB = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")
_NO_RANKS = (
    b"torchrun",
    b"torch.distributed.run",
    b"torch.distributed.launch",
    b"torch/distributed/run.py",
    b"dtobs",
    b"py-spy",
)
_TELLING = ("NCCL_RAS", "TORCH_NCCL", "TORCH_FR", "XDG_CACHE_HOME", "HOME")
_MAX_BYTES = 1 << 20
_MAX_DEPTH = 64


@dataclass(frozen=True)
class TrainingProcess:
    """One process that is, or may be, a rank. `rank` is -1 where nothing tells it; `world` is 0."""

    pid: int
    parent: int
    rank: int
    world: int
    command: str
    job: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()  #: only what concerns debugging: NCCL_RAS…, TORCH_…
    python: bool = True  #: whether the program is Python; a wrapper (timeout, bash -c) only has it among its arguments

    def setting(self, name: str) -> str:
        """One variable of its environment, or nothing."""
        return dict(self.environment).get(name, "")


def training_processes(proc: Path = Path("/proc")) -> list[TrainingProcess]:
    """Every rank on this host whose environment may be read, by job and rank."""
    seen = {found.pid: found for pid in process_ids(proc) if (found := read_candidate(pid, proc)) is not None}
    ranks = [one for one in seen.values() if one.rank >= 0 and not _helper(one, seen)]
    return sorted(ranks, key=lambda one: (one.job, one.rank, one.pid))


def named_processes(pids: list[int], proc: Path = Path("/proc")) -> list[TrainingProcess]:
    """The ranks that are the given processes or below them; numbered by their age where nothing tells a rank."""
    everything = {pid: read_any(pid, proc) for pid in process_ids(proc)}
    known = {pid: one for pid, one in everything.items() if one is not None}
    found: list[TrainingProcess] = []
    for pid in pids:
        if pid not in known:
            continue
        below = [known[pid], *_below(pid, known)]
        ranks = [one for one in below if one.rank >= 0 and not _helper(one, known)]
        ranks = [one for one in ranks if one.python] or ranks
        spawned = [one for one in below if one.pid != pid and "spawn_main" in one.command]
        found += ranks or ([] if known[pid].rank >= 0 else _outermost(spawned)) or [known[pid]]
    unique = list({one.pid: one for one in found}.values())
    if len({one.rank for one in unique}) == len(unique) and all(one.rank >= 0 for one in unique):
        return sorted(unique, key=lambda one: one.rank)
    ordered = unique if len(pids) > 1 else sorted(unique, key=lambda one: (start_ticks(one.pid, proc), one.pid))
    return [replace(one, rank=number, world=0) for number, one in enumerate(ordered)]


def read_candidate(pid: int, proc: Path = Path("/proc")) -> TrainingProcess | None:
    """The process, if it runs Python and is no launcher and none of our own."""
    found = read_any(pid, proc)
    if found is None or pid == os.getpid() or not found.python:
        return None
    return None if any(word in found.command.encode() for word in _NO_RANKS) else found


def read_any(pid: int, proc: Path = Path("/proc")) -> TrainingProcess | None:
    """What /proc says of a process; None when it is gone or may not be read."""
    try:
        command = _bytes(proc / str(pid) / "cmdline")
        environment = dict(
            entry.split("=", 1)
            for entry in _bytes(proc / str(pid) / "environ").decode(errors="replace").split("\0")
            if "=" in entry
        )
        stat = _bytes(proc / str(pid) / "stat").decode(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    launcher = any(word in command for word in _NO_RANKS)
    names = _RANK[:1] if launcher or "TORCHELASTIC_RUN_ID" in environment else _RANK
    rank = -1 if launcher else next((_whole(environment[name]) for name in names if name in environment), -1)
    world = next((_whole(environment[name]) for name in _WORLD if name in environment), 0)
    telling = tuple((k, v) for k, v in sorted(environment.items()) if k.startswith(_TELLING))
    return TrainingProcess(
        pid,
        int(stat[1]) if len(stat) > 1 and stat[1].isdigit() else 0,
        rank,
        max(world, 0),
        command.replace(b"\0", b" ").decode(errors="replace").strip()[:4096],
        tuple(environment.get(name, "") for name in _JOB),
        telling,
        _is_python(command, proc / str(pid) / "exe"),
    )


def _is_python(command: bytes, exe: Path) -> bool:
    """Whether a process's program is Python: by its file, or by its name where that cannot be read."""
    try:
        program = exe.readlink().name
    except OSError:
        program = ""
    return "python" in program.lower() or b"python" in command.split(b"\0", 1)[0].rpartition(b"/")[2].lower()


def _helper(one: TrainingProcess, known: dict[int, TrainingProcess]) -> bool:
    """Whether a process above it is the same rank, or it is one of our own."""
    if any(word in one.command.encode() for word in _NO_RANKS):
        return True
    above = known.get(one.parent)
    for _ in range(_MAX_DEPTH):
        if above is None:
            return False
        if above.rank == one.rank and above.job == one.job and above.python:
            return True
        above = known.get(above.parent)
    return False


def _below(pid: int, known: dict[int, TrainingProcess]) -> list[TrainingProcess]:
    found, layer = [], {pid}
    for _ in range(_MAX_DEPTH):
        children = [one for one in known.values() if one.parent in layer]
        if not children:
            break
        found += children
        layer = {one.pid for one in children}
    return found


def _outermost(some: list[TrainingProcess]) -> list[TrainingProcess]:
    pids = {one.pid for one in some}
    return [one for one in some if one.parent not in pids]


def _bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_MAX_BYTES)


def _whole(text: str) -> int:
    return int(text) if text.isdigit() and len(text) < 8 else -1
