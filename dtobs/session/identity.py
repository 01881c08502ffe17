"""Which rank this process is, and which run directory all ranks of the job agree on, without a collective."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from dtobs.errors import TargetError, UsageError
from dtobs.host.process import boot_id, pid_namespace
from dtobs.recording.meta import read_meta
from dtobs.recording.rundir import RunDirectory, new_run_path
from dtobs.recording.view import living

_REFUSED = -1
AGREE_SECONDS = 60.0
"""How long a rank waits to be told where the run is recorded."""


@dataclass(frozen=True)
class Identity:
    """One rank of one attempt.

    `attempt` is torchrun's restart count until the ranks have agreed on one. `launch` is torchrun's run id, "" when it
    has none of its own. `node` is -1 where no launcher says it, until `host_number` does. `starts_monitor`: whether
    this rank starts the monitor of its node.
    """

    rank: int
    world_size: int
    local_rank: int
    node: int
    attempt: int
    launch: str = ""
    starts_monitor: bool = False

    @classmethod
    def find(cls, environment: Mapping[str, str] | None = None) -> Identity:
        """From the process group where there is one, else from torchrun's variables, else a single process."""
        values = os.environ if environment is None else environment
        rank, world = _from_group() or (first_number(values, "RANK"), first_number(values, "WORLD_SIZE", default=1))
        per_node = first_number(values, *PER_NODE)
        local = first_number(values, *_LOCAL, default=rank)
        node = first_number(values, *_NODE, default=rank // per_node if per_node else 0 if world == 1 else -1)
        launch = values.get("TORCHELASTIC_RUN_ID", "")
        return cls(
            rank=rank,
            world_size=world,
            local_rank=local,
            node=node,
            attempt=first_number(values, "TORCHELASTIC_RESTART_COUNT"),
            launch="" if launch == "none" else launch,
        )


# Of torchrun, Open MPI, Intel MPI, Slurm and launchers of frameworks. What Slurm says is of whom it started itself.
_LOCAL = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
_NODE = ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID")
PER_NODE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_SIZES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def launched_as(world_size: int, environment: Mapping[str, str] | None = None) -> str:
    """What says that this process of a world of one was started as one of several; "" when nothing does."""
    values = os.environ if environment is None else environment
    said = next((name for name in _SIZES if first_number(values, name, default=1) > 1), "")
    return f"{said}={values[said]}" if said and world_size == 1 else ""


def first_number(values: Mapping[str, str], *names: str, default: int = 0) -> int:
    """The first number among variables."""
    return next((int(values[name]) for name in names if values.get(name, "").isdecimal()), default)


def _from_group() -> tuple[int, int] | None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return None


_agreed: dict[str, int] = {}
"""How often this process has agreed on a run, so that a second time gets a key of its own."""


class Agreement(NamedTuple):
    """What the ranks have agreed on: where, in which attempt, and whether this rank is the one that decided."""

    path: Path
    attempt: int
    first: bool


def resolve_run_dir(asked: str | os.PathLike[str] | None, name: str, who: Identity) -> Agreement:
    """The run's directory, absolute, and the number of this attempt in it, the same on all ranks.

    Rank 0 decides; below `dtobs run` on one host the first rank that asks does, since rank 0 asks for nothing where it
    has no optimizer (a parameter server), and a rank that waits for it keeps the training waiting.

    The directory is `asked`, else DTOBS_RUN_DIR, else a new one that rank 0 chooses. The attempt is the first that
    has not recorded there: a restart by torchrun, or a later job in the same directory, overwrites nothing. Where
    there is no store to agree through, it is torchrun's restart count.
    Raises UsageError where another job trains in it, OSError or RuntimeError when rank 0 says nothing in time.
    """
    given = asked if asked is not None else os.environ.get("DTOBS_RUN_DIR")
    path = Path(given).absolute() if given else None
    store = _store() if who.world_size > 1 else None
    if store is None and who.world_size > 1:
        return Agreement(path or _choose(name, who), who.attempt, who.rank == 0)
    count = _agreed.get("count", 0)
    _agreed["count"] = count + 1
    key = f"dtobs/run/{_generation(who)}/{count}"
    first = who.rank == 0
    if store is not None and path is not None and one_host(who):
        first = store.add(f"{key}/first", 1) == 1
    if store is not None and not first:
        store.wait([key], timedelta(seconds=AGREE_SECONDS))
        chosen, attempt = json.loads(store.get(key))
        if attempt == _REFUSED:
            raise UsageError(chosen)
        return Agreement(path or Path(chosen), int(attempt), first=False)
    path = path or _choose(name, who)
    refusal = _another_job(path) if given is not None else ""
    attempt = _REFUSED if refusal else _free_attempt(RunDirectory(path))
    if store is not None:
        store.set(key, json.dumps([refusal or str(path), attempt]))
    if refusal:
        raise UsageError(refusal)
    return Agreement(path, attempt, first=True)


def host_number(who: Identity) -> tuple[int, bool]:
    """The number of this host in the order in which the job's ranks came, and whether this rank is its first.

    Containers of one machine are hosts of their own: none sees the processes of another. Without a store to agree
    through all are host 0. Raises OSError or RuntimeError when its first rank says nothing in time.
    """
    store = _store()
    if store is None:
        return 0, who.local_rank == 0
    count = _agreed.get("hosts", 0)
    _agreed["hosts"] = count + 1
    key = f"dtobs/hosts/{_generation(who)}/{count}"
    here = f"{key}/{boot_id()}/{pid_namespace()}"
    if store.add(f"{here}/ranks", 1) == 1:
        number = store.add(f"{key}/count", 1) - 1
        store.set(f"{here}/number", str(number))
        return number, True
    store.wait([f"{here}/number"], timedelta(seconds=AGREE_SECONDS))
    return int(store.get(f"{here}/number")), False


def one_host(who: Identity) -> bool:
    """Whether all ranks are on this host and `dtobs run` started them, so that every one finds the same."""
    return "DTOBS_RUN_NAME" in os.environ and first_number(os.environ, "LOCAL_WORLD_SIZE") == who.world_size


def _another_job(path: Path) -> str:
    """Why this job cannot record in `path`: another one trains there; "" where none does.

    Not another one are this process, the one that it was forked from, and what the same launcher started.
    """
    own = (os.getpid(), os.getppid())
    run = RunDirectory(path)
    for rank, pid in living(path).items():
        mine = pid in own or ("TORCHELASTIC_RUN_ID" in os.environ and _has_worked_in(run, os.getppid()))
        if not mine:
            return f"{path} belongs to a job that still runs (rank {rank} is process {pid}): name another run directory"
    return ""


def _generation(who: Identity, environment: Mapping[str, str] | None = None) -> int:
    """Tells the keys of this start of the ranks from those of earlier ones in the same store.

    Each start has a store of its own, but for the agents' one, which torchrun shares by default. Agents count restarts
    each for itself: where one has joined late the counts differ, and only a store of its own brings ranks together.
    """
    values = os.environ if environment is None else environment
    return who.attempt if values.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0


def told_by_first(who: Identity, topic: str, make: Callable[[], Any]) -> Any:
    """What rank 0 makes, JSON-ready, for every rank that asks; None where there is no store to tell it through.

    `topic` is new at each use. Raises OSError or RuntimeError when rank 0 says nothing in time.
    """
    store = _store() if who.world_size > 1 else None
    if who.rank == 0:
        made = make()
        if store is not None:
            store.set(f"dtobs/{topic}", json.dumps(made))
        return made
    if store is None:
        return None
    store.wait([f"dtobs/{topic}"], timedelta(seconds=AGREE_SECONDS))
    return json.loads(store.get(f"dtobs/{topic}"))


def _free_attempt(run: RunDirectory) -> int:
    """The first that no rank has recorded here. Not rank 0 alone: before a restart it may have been on another disk."""
    names = (path.stem for rank in run.ranks() for path in run.rank(rank).glob("meta-*.jsonl"))
    numbers = [text for name in names if (text := name.partition("-")[2]).isdecimal()]
    return max(map(int, numbers), default=-1) + 1


def _choose(name: str, who: Identity) -> Path:
    """A new directory, or after a restart by torchrun the one of the attempts before."""
    path = new_run_path(name)
    if not who.launch:
        return path
    for earlier in sorted(path.parent.glob(f"*-{path.name.partition('-')[2]}"), reverse=True):
        run = RunDirectory(earlier)
        try:
            same = run.read_run().get("launch") == who.launch
        except TargetError:
            continue
        # A start because a node came or went does not count as a restart; a later job may have the same run id.
        if same and (who.attempt > 0 or _has_worked_in(run, os.getppid())):
            return earlier
    return path


def _has_worked_in(run: RunDirectory, agent: int) -> bool:
    """Whether a process that `agent` started on this host has recorded in a run."""
    for rank in run.ranks():
        for path in run.rank(rank).glob("meta-*.jsonl"):
            process = read_meta(path).process
            if process.get("parent_pid") == agent and process.get("boot_id") == boot_id():
                return True
    return False


def _store() -> Any:
    """The store that the process group met through, else torchrun's own; None without one.

    Private torch, tried with 2.13.
    """
    import torch.distributed as dist

    if not dist.is_available():
        return None
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import distributed_c10d

    if dist.is_initialized():
        get = getattr(distributed_c10d, "_get_default_store", None)
        return get() if get is not None else None
    values = os.environ
    if values.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and values.get("MASTER_PORT", "").isdecimal():
        return TCPStore(
            values.get("MASTER_ADDR", "127.0.0.1"),
            int(values["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=AGREE_SECONDS),
        )
    return None
