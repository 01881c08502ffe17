"""The run directory: one for all ranks and all attempts of a run, private to the user.

    runs/20261120-120301-train/
        ranks/00000/stdout.log, stderr.log    what each rank printed
        checkpoints/step-00000100/            see checkpoint.py
        config.json                           the settings as they were understood
        launch/                               which launchers work in it

Rank 0 chooses it and tells the others through the rendezvous store. A launcher that restarts its workers finds the
directory it used before by its identity (host, process id, start time), whichever of its processes is rank 0 now.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from runtime.config import Config
from runtime.errors import UsageError
from runtime.world import World

_KEY = "run_dir"


def agree(config: Config, world: World) -> Path:
    """The run directory of this run, absolute; made by rank 0. Every rank must call it; no collective.

    Raises UsageError, on every rank, where it cannot be made.
    """
    if world.place.rank == 0:
        try:
            run_dir = _choose(config, os.environ)
            world.store.set(_KEY, str(run_dir))
        except OSError as error:
            text = f"cannot make the run directory {error.filename}: {error.strerror}"
            world.store.set(_KEY, f"!{text}")
            raise UsageError(text) from error
    answer = world.store.get(_KEY).decode()
    if answer.startswith("!"):
        raise UsageError(answer[1:])
    run_dir = Path(answer)
    private_folder(run_dir / "ranks" / f"{world.place.rank:05d}")
    identity = launcher_identity(os.environ)
    if identity is not None:
        private_folder(run_dir / "launch")
        (run_dir / "launch" / identity).touch(mode=0o600)
    return run_dir


def _choose(config: Config, environment: Mapping[str, str]) -> Path:
    root = Path(config.run.root).expanduser().absolute()
    identity = launcher_identity(environment)
    if config.run.run_dir:
        run_dir = Path(config.run.run_dir).expanduser().absolute()
    elif identity is not None and (known := sorted(root.glob(f"*/launch/{identity}"))):
        return known[-1].parent.parent
    else:
        run_dir = _new(root, config.run.name)
    for folder in (run_dir, run_dir / "ranks", run_dir / "checkpoints"):
        private_folder(folder)
    write_private(run_dir / "config.json", json.dumps(config.as_dict(), indent=1))
    return run_dir


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
    started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{socket.gethostname()}-{parent}-{started}"


def private_folder(path: Path) -> None:
    """Make a folder only its owner can enter, and its parents."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def write_private(path: Path, text: str) -> None:
    """Write a file only its owner can read."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
