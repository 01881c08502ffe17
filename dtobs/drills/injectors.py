"""What is done to a rank: each injector does to its own process what happens to real ones."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import subprocess
import threading
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

GRADIENTS = 32 * 64 + 64 + 64 * 32 + 32
"""Elements of the job's parameters, which DDP reduces in one bucket."""
_SO_ATTACH_FILTER = 26
_MORE_THAN_PERMITTED = 1 << 30


class StopTraining(Exception):
    """The rank is to leave its training loop as if its data had ended."""


class InjectedError(RuntimeError):
    """The exception of the fault "exception"."""


def do_nothing(_odd: bool = False) -> None:
    """The healthy twin of everything else here."""


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


def stop_process_briefly(seconds: float = 1.0) -> None:
    """The same, and somebody resumes it before anyone had to worry."""
    pid = os.getpid()
    with subprocess.Popen(["/bin/sh", "-c", f"sleep {seconds}; kill -CONT {pid}"]):
        os.kill(pid, signal.SIGSTOP)


def kill_process() -> None:
    """Kill this process without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def use_up_memory() -> NoReturn:
    """Allocate until the kernel kills this process; only for a process in a control group with a small limit."""
    kept = b"x" * _MORE_THAN_PERMITTED
    raise MemoryError(f"the memory limit of this drill does not hold: nothing was killed at {len(kept)} bytes")


def stay_away() -> None:
    """Wait for something of one's own, for ever, in the place of the next collective."""
    threading.Event().wait()


def raise_exception() -> NoReturn:
    """Fail as a bug does."""
    raise InjectedError("injected: bad sample 17")


def leave_early() -> NoReturn:
    """Stop training while the others go on."""
    raise StopTraining


def drop_what_arrives(_odd: bool) -> None:
    """Let every TCP connection of this process lose what its peer sends, as a dead link does. No privilege needed.

    The kernel runs a packet filter that keeps nothing in front of each socket. Raises OSError where filters are
    forbidden.
    """
    for entry in Path("/proc/self/fd").iterdir():
        try:
            connection = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:  # no socket, or closed since it was listed
            continue
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                keep_nothing(connection)


def keep_nothing(connection: socket.socket) -> None:
    """Attach a filter that drops every packet that arrives for `connection`. Raises OSError."""
    keep_no_byte = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF_RET | BPF_K, 0
    program = struct.pack("HP", 1, ctypes.addressof(keep_no_byte))
    connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


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


def receive_once_more(odd: bool) -> None:
    """A receive from the rank before, which sends nothing: one more than the other side knows of."""
    if odd:
        dist.recv(torch.zeros(3), src=(dist.get_rank() - 1) % dist.get_world_size())


def cross_two_groups(odd: bool) -> None:
    """Two groups of the same ranks, used in the other order on the odd rank: each waits for the other."""
    limit = timedelta(minutes=5)
    first, second = (dist.new_group(timeout=limit, group_desc=name) for name in ("activations", "weights"))
    for group in (second, first) if odd else (first, second):
        dist.all_reduce(torch.ones(4), group=group)


def stay_away_alike(_odd: bool) -> None:
    """Every rank waits for something of its own: none of them for another."""
    stay_away()


def skip_a_group(odd: bool) -> None:
    """A process group that all make but the odd rank, which stands elsewhere for ever."""
    if odd:
        stay_away()
    dist.new_group(timeout=timedelta(minutes=5), group_desc="activations")


def make_groups(odd: bool) -> None:
    """Two process groups that all ranks make in the same order, once and for all: nothing is wrong with that."""
    if not _MADE:
        _MADE.extend(dist.new_group(group_desc=name) for name in ("activations", "weights"))


_MADE: list[object] = []
