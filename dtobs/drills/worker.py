"""One rank of a drill, in a process forked from one that has torch already."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dtobs.drills import flipped_job, job, lost_time, silent
from dtobs.drills.capabilities import Confinement


def main(
    family: str,
    fields: Mapping[str, Any],
    environment: Mapping[str, str],
    folder: Path,
    stay: Connection,
    confinement: Confinement,
) -> None:
    """Train what `fields`, those of the family's job, describe. Raises what the fault raises.

    `environment` are the variables of a torchrun worker; ranks meet through a file in `folder`. A rank that is done
    stays until `stay` closes, so that no peer sees a connection close only because it was slower; one that hangs ends
    then too, where it still can, whatever became of the drill.
    """
    leaving = threading.Thread(target=_leave_with, args=(stay,), name="drill-end", daemon=True)
    leaving.start()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in any script; its forkserver ignores it
    os.environ.update(environment)
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    confinement.enter()
    torch.set_num_threads(1)

    def meet() -> None:
        store, limit = f"file://{folder / 'store'}", timedelta(seconds=fields.get("timeout_seconds", 300))
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=limit)

    if family == "hangs":
        job.meet_and_train(job.Job(**fields), meet)
    elif family == "time":
        meet()
        lost_time.train(lost_time.TimeJob(**fields))
    elif family == "flips":
        meet()
        flipped_job.train_all(flipped_job.FlippedJob(**fields), stay.send)
    else:
        meet()
        silent.train(silent.SilentJob(**fields))
    (folder / f"done-{rank}").touch()
    leaving.join()


def _leave_with(stay: Connection) -> None:
    stay.poll(None)
    # Gloo's threads outlive destroy_process_group() for a moment and would abort an ordinary exit.
    os._exit(0)
