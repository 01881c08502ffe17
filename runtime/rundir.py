"""The run directory: one for all ranks and all attempts of a run, private to the user.

    runs/20261120-120301-train/
        ranks/00000/stdout.log, stderr.log    what each rank printed
        checkpoints/step-00000100/            see checkpoint.py
        config.json                           the settings as they were understood
        launch/                               which launchers work in it

Rank 0 chooses it and tells the others through the rendezvous store. After a restart a launcher knows the directory it
used before by its identity (host, process id, start time). Any of the launchers may be gone and another one new, so
each says what it knows before rank 0 chooses.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch.distributed as dist

from runtime.config import Config
from runtime.errors import UsageError
from runtime.world import RankPlace, World

_KEY = "run_dir"


@dataclass(frozen=True)
class RunLocation:
    """The run directory, absolute, and whether this is a restart: a launcher of this job has worked in it before.

    Rank 0 knows that for certain; others may read what was true of an earlier attempt in the launcher's store.
    """

    path: Path
    restarted: bool


def resolve_run_dir(config: Config, world: World) -> RunLocation:
    """The run directory of this run; made by rank 0. Every rank must call it; no collective.

    Raises UsageError, on every rank, where it cannot be made.
    """
    identity = launcher_identity(os.environ)
    if identity is not None and world.place.local_rank == 0:
        world.store.set(_known_key(_group()[0]), str(_known(config, identity) or ""))
    if world.place.rank == 0:
        try:
            known = _known_to_anybody(world) if identity is not None else None
            run_dir = known or _make(config)
            world.store.set(_KEY, json.dumps({"path": str(run_dir), "restarted": known is not None}))
        except OSError as error:
            text = _refusal(error, config.run.run_dir or config.run.root)
            world.store.set(_KEY, json.dumps({"error": text}))
            raise UsageError(text) from error
    answer = json.loads(world.store.get(_KEY))
    if "error" in answer:
        raise UsageError(answer["error"])
    run_dir = Path(answer["path"])
    try:
        private_folder(run_dir / "launch")
        own = identity or f"{socket.gethostname()}-{os.getpid()}-{_start_time(os.getpid())}"
        (run_dir / "launch" / own).touch(mode=0o600)
    except OSError as error:
        raise UsageError(_refusal(error, run_dir)) from error
    return RunLocation(run_dir, answer["restarted"])


def make_rank_folder(run_dir: Path, place: RankPlace) -> Path:
    """Make the folder of this rank in the run directory. Every rank must call it: it is a collective.

    Raises UsageError, on every rank, where one of them cannot: else the others would tell that its connection broke.
    """
    folder, refusals = run_dir / "ranks" / f"{place.rank:05d}", [""] * place.size
    try:
        private_folder(folder)
        refusal = ""
    except OSError as error:
        refusal = _refusal(error, folder)
    dist.all_gather_object(refusals, refusal)
    for text in filter(None, refusals):
        raise UsageError(text)
    return folder


def _refusal(error: OSError, folder: str | Path) -> str:
    """One line; a full disk does not say where, so `folder` does."""
    return f"cannot make the run directory {error.filename or folder}: {error.strerror}; choose another with --run-dir"


def _group() -> tuple[int, int]:
    """This node among the launchers, and how many they are."""
    return int(os.environ["GROUP_RANK"]), int(os.environ["GROUP_WORLD_SIZE"])


def _known_key(node: int) -> str:
    return f"{_KEY}/known/{node}"


def _known(config: Config, identity: str) -> Path | None:
    """Where the workers of this launcher have been before; None for its first ones."""
    if config.run.run_dir:
        run_dir = Path(config.run.run_dir).expanduser().absolute()
        return run_dir if (run_dir / "launch" / identity).exists() else None
    known = sorted(Path(config.run.root).expanduser().absolute().glob(f"*/launch/{identity}"))
    return known[-1].parent.parent if known else None


def _known_to_anybody(world: World) -> Path | None:
    """On rank 0: the newest directory that the launcher of any node has worked in."""
    known = [path for node in range(_group()[1]) if (path := world.store.get(_known_key(node)).decode())]
    return Path(max(known)) if known else None


def _make(config: Config) -> Path:
    if config.run.run_dir:
        run_dir = Path(config.run.run_dir).expanduser().absolute()
        _refuse_a_live_job(run_dir)
    else:
        run_dir = _new(Path(config.run.root).expanduser().absolute(), config.run.name)
    for folder in (run_dir, run_dir / "ranks", run_dir / "checkpoints"):
        private_folder(folder)
    write_private(run_dir / "config.json", json.dumps(config.as_dict(), indent=1))
    return run_dir


def _refuse_a_live_job(run_dir: Path) -> None:
    """Raises UsageError where a launcher of this host that works in `run_dir` still lives: both would write there."""
    for path in (run_dir / "launch").glob(f"{socket.gethostname()}-*"):
        pid, _, started = path.name.removeprefix(f"{socket.gethostname()}-").partition("-")
        if pid.isdecimal() and _start_time(int(pid)) == started and int(pid) not in (os.getpid(), os.getppid()):
            raise UsageError(
                f"another job trains in {run_dir} (its launcher is process {pid}): choose another --run-dir, or end it"
            )


def _start_time(pid: int) -> str:
    """When a process began, as the kernel counts; "" when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


def _new(root: Path, name: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    began = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    for attempt in range(1000):
        run_dir = root / (f"{began}-{name}" if attempt == 0 else f"{began}-{name}-{attempt + 1}")
        try:
            run_dir.mkdir(mode=0o700)
            return run_dir
        except FileExistsError:  # another run began in the same second
            continue
    raise UsageError(f"cannot find a free name in {root}")


def launcher_identity(environment: Mapping[str, str]) -> str | None:
    """What stays the same when torchrun restarts its workers: host, its process id and start time; None without it."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    parent = os.getppid()
    return f"{socket.gethostname()}-{parent}-{_start_time(parent)}"


def private_folder(path: Path) -> None:
    """Make a folder only its owner can enter, and its parents."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def write_private(path: Path, text: str) -> None:
    """Write a file only its owner can read."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
