"""This process' place among the ranks: joining the process group and leaving it.

Under torchrun the rendezvous comes from the environment; without it the process is a world of its own.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from runtime.config import Config
from runtime.errors import UsageError


@dataclass(frozen=True)
class RankPlace:
    """Rank and size, in the job and on this node, as the launcher says; known before any process group."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> RankPlace:
        """Read torchrun's variables; without them, one process."""
        if "RANK" not in environment:
            return cls()
        for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            if not environment.get(name):
                raise UsageError(
                    f"RANK is set and {name} is not: start the training with torchrun, or unset RANK to train in one"
                    " process"
                )
        try:
            int(environment["MASTER_PORT"])
            return cls(
                int(environment["RANK"]),
                int(environment["WORLD_SIZE"]),
                int(environment.get("LOCAL_RANK", environment["RANK"])),
                int(environment.get("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"])),
            )
        except ValueError as error:
            raise UsageError(f"RANK is set but the launcher's other variables are not usable: {error}") from error


@dataclass(frozen=True)
class World:
    """A joined process group. `store` is the rendezvous store: key-value, no collective needed."""

    place: RankPlace
    store: dist.Store
    device: torch.device


def choose_device(asked: str, place: RankPlace) -> torch.device:
    """The device of this process. Raises UsageError where CUDA was asked for and cannot be had."""
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if place.local_size > count:
        raise UsageError(
            f"{place.local_size} processes on this node and {count} CUDA devices: start at most {max(count, 1)}"
            " processes a node or use --device cpu"
        )
    return torch.device("cuda", place.local_rank)


def join(config: Config, place: RankPlace, device: torch.device) -> World:
    """Join the process group of the job. Every rank must call it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=config.run.collective_timeout)
    if "RANK" in os.environ:
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    else:
        store = dist.HashStore()
    store.set_timeout(timeout)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("training", store),
        rank=place.rank,
        world_size=place.size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    return World(place, dist.PrefixStore("runtime", store), device)


def leave(world: World) -> None:
    """Leave the process group after a training that went well: wait for the others, then take it down.

    Not to be called after a failure: the others may never come.
    """
    dist.barrier()
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    dist.destroy_process_group()


def exit_now(code: int) -> NoReturn:
    """End this process with `code`, without running the destructors of C++ libraries.

    On Gloo, torch 2.13 aborts about one exit in ten that comes right after destroy_process_group ("terminate called
    without an active exception"): a communication thread is still joinable when static destructors run. After a
    failure the ordinary exit can also wait for peers that are gone. By now all of ours is closed: nothing is lost.
    """
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        if stream is not None and not stream.closed:
            try:
                stream.flush()
            except OSError:  # a closed pipe: there is nobody left to read it
                pass
    threading.excepthook = lambda _: None
    os._exit(code)
