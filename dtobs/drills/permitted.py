"""What a fault needs of this machine: memory control groups of our own, packet filters; and whether it is permitted."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from dtobs.drills.injectors import keep_nothing

MEMORY_BYTES = 512 << 20
"""The limit of a group that runs out of memory: several times what a rank of a drill takes."""
_GONE_SECONDS = 5.0


def refused(need: str) -> str:
    """Why this machine does not permit what a fault needs, in words; "" where it does."""
    if need == "packet-filter":
        with socket.socket() as unconnected:
            try:
                keep_nothing(unconnected)
            except OSError as error:
                return f"packet filters on sockets are not permitted here ({error.strerror})"
    elif need == "memory-limit":
        try:
            with memory_group("permitted"):
                pass
        except OSError as error:
            return f"no memory control group can be made here ({error.strerror})"
    return ""


@contextlib.contextmanager
def memory_group(name: str) -> Iterator[Path]:
    """A memory control group below this process's own, limited to MEMORY_BYTES; removed at the end.

    Needs root, or a delegated group. Raises OSError where it cannot be made.
    """
    parent, limit = _own_group()
    group = parent / f"dtobs-drill-{name}-{time.monotonic_ns()}"
    group.mkdir()
    try:
        (group / limit).write_text(str(MEMORY_BYTES))
        yield group
    finally:
        deadline = time.monotonic() + _GONE_SECONDS
        while True:
            try:
                group.rmdir()
                break
            except OSError:  # the kernel has not yet reaped the last process in it
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)


def _own_group() -> tuple[Path, str]:
    """The memory control group of this process and the name of its limit. Raises OSError where there is none."""
    root = Path("/sys/fs/cgroup")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        if "memory" in controllers.split(","):
            return root / "memory" / name.lstrip("/"), "memory.limit_in_bytes"
        own = root / name.lstrip("/")
        if controllers == "" and (own / "memory.max").exists():
            return own, "memory.max"
    raise FileNotFoundError(2, "no control group of this process has a memory controller")
