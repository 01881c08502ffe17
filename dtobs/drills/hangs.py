"""Injectors of hangs and crashes: each does to its own process what happens to real ones.

A `Fault` says where in a step it strikes and which code `dtobs diagnose` must answer with. The healthy twin of all of
them is the fault "none".
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NoReturn

import torch
import torch.distributed as dist

Strike = Callable[[], None]
GRADIENTS = 32 * 64 + 64 + 64 * 32 + 32
"""Elements of the job's parameters, which DDP reduces in one bucket."""
Point = Literal["nowhere", "forward", "loader", "checkpoint", "everywhere"]


class StopTraining(Exception):
    """The rank is to leave its training loop as if its data had ended."""


class InjectedError(RuntimeError):
    """The exception of the fault "exception"."""


def block_in_read() -> None:
    """Read from a pipe that nobody writes to: storage that does not answer. The Python lock is free."""
    receiving, _kept_open = os.pipe()
    os.read(receiving, 1)


def hold_python_lock() -> None:
    """The same read from C without letting go of the Python lock: a native call that forgot to."""
    receiving, _kept_open = os.pipe()
    buffer = ctypes.create_string_buffer(1)
    ctypes.PyDLL(None).read(receiving, buffer, 1)


def stop_process() -> None:
    """Suspend this process, as a debugger or a job-control key does."""
    os.kill(os.getpid(), signal.SIGSTOP)


def kill_process() -> None:
    """Kill this process without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def stay_away() -> None:
    """Wait for something of one's own, for ever, in the place of the next collective."""
    threading.Event().wait()


def raise_exception() -> NoReturn:
    """Fail as a bug does."""
    raise InjectedError("injected: bad sample 17")


def leave_early() -> NoReturn:
    """Stop training while the others go on."""
    raise StopTraining


def reduce_other_shape(odd: bool) -> None:
    """An all-reduce whose size differs on the odd rank."""
    dist.all_reduce(torch.ones(8 if odd else 4))


def reduce_other_dtype(odd: bool) -> None:
    """An all-reduce whose element type differs on the odd rank, at the same number of bytes."""
    dist.all_reduce(torch.ones(4, dtype=torch.float16 if odd else torch.bfloat16))


def reduce_other_operation(odd: bool) -> None:
    """An all-reduce that takes the maximum on the odd rank and the sum elsewhere. Nothing raises."""
    dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)


def swap_order(odd: bool) -> None:
    """An all-reduce and a broadcast, in the other order on the odd rank."""
    first, second = torch.ones(4), torch.ones(4)
    if odd:
        dist.broadcast(second, 0)
    dist.all_reduce(first)
    if not odd:
        dist.broadcast(second, 0)


def reduce_once_more(odd: bool) -> None:
    """An all-reduce of the size of the gradients, from the odd rank alone: it meets the gradients of the others."""
    if odd:
        dist.all_reduce(torch.ones(GRADIENTS))


@dataclass(frozen=True)
class Fault:
    """One fault: where it strikes, the code that names it, and whether only its own rank is to be named.

    `strike` is what the odd rank does; for faults "everywhere" all ranks call `strike_all(odd)`.
    """

    name: str
    point: Point
    code: str | None
    strike: Strike = lambda: None
    strike_all: Callable[[bool], None] = lambda odd: None
    names_odd_rank: bool = True
    needs_stall: bool = True  #: found once nothing has moved for the hang timeout; else at once
    wrappers: tuple[Literal["ddp", "fsdp"], ...] = (
        "ddp",
        "fsdp",
    )  #: of the model, under which it can be injected


_ROWS = (
    Fault("none", "nowhere", None),
    Fault("blocked-loader", "loader", "stuck-in-dataloader", block_in_read),
    Fault("blocked-checkpoint", "checkpoint", "stuck-in-checkpoint", block_in_read),
    Fault("absent", "forward", "rank-not-joined", stay_away),
    Fault("stopped", "forward", "rank-stopped", stop_process),
    Fault("python-lock", "forward", "gil-held", hold_python_lock),
    Fault("killed", "forward", "rank-dead", kill_process, needs_stall=False),
    Fault("exception", "forward", "uncaught-exception", raise_exception, needs_stall=False),
    Fault("early-exit", "forward", "rank-exited-early", leave_early),
    Fault("shape", "everywhere", "shape-mismatch", strike_all=reduce_other_shape, needs_stall=False),
    Fault("dtype", "everywhere", "dtype-mismatch", strike_all=reduce_other_dtype, needs_stall=False),
    Fault("order", "everywhere", "collective-mismatch", strike_all=swap_order, needs_stall=False),
    Fault(
        "extra-call",
        "everywhere",
        "call-site-mismatch",
        strike_all=reduce_once_more,
        needs_stall=False,
        wrappers=("ddp",),  # FSDP's next call is of another kind, which is a mismatch that backends notice
    ),
    Fault(
        "reduce-op", "everywhere", "reduce-op-mismatch", strike_all=reduce_other_operation, needs_stall=False
    ),
)
FAULTS: dict[str, Fault] = {fault.name: fault for fault in _ROWS}
"""Every fault of the family by name."""
