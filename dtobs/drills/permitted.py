"""What a fault needs of this machine: control groups of our own, packet filters; and whether it is permitted."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from dtobs.drills.injectors import keep_nothing

MEMORY_BYTES = 512 << 20
"""The limit of a group that runs out of memory: several times what a rank of a drill takes."""
QUOTA_US, PERIOD_US = 20_000, 100_000
"""The processor time of a group that is throttled: a fifth of a core."""
_GONE_SECONDS = 5.0
_LIMITS = {
    "memory-limit": ("memory", {"memory.limit_in_bytes": f"{MEMORY_BYTES}"}, {"memory.max": f"{MEMORY_BYTES}"}),
    "cpu-quota": (
        "cpu",
        {"cpu.cfs_period_us": f"{PERIOD_US}", "cpu.cfs_quota_us": f"{QUOTA_US}"},
        {"cpu.max": f"{QUOTA_US} {PERIOD_US}"},
    ),
}
"""By need: the controller, and the files of a group's limit under versions 1 and 2 of control groups."""


def refused(need: str) -> str:
    """Why this machine does not permit what a fault needs, in words; "" where it does."""
    if need == "packet-filter":
        with socket.socket() as unconnected:
            try:
                keep_nothing(unconnected)
            except OSError as error:
                return f"packet filters on sockets are not permitted here ({error.strerror})"
    elif need in _LIMITS:
        try:
            with limited_group(need, "permitted"):
                pass
        except OSError as error:
            return f"no control group with a limit of {_LIMITS[need][0]} can be made here ({error.strerror})"
    return ""


@contextlib.contextmanager
def limited_group(need: str, name: str) -> Iterator[Path]:
    """A control group below this process's own with the limit of `need`; removed at the end.

    Needs root, or a delegated group. Raises OSError where it cannot be made.
    """
    parent, limits = _own_group(need)
    group = parent / f"dtobs-drill-{name}-{time.monotonic_ns()}"
    group.mkdir()
    try:
        for file, value in limits.items():
            (group / file).write_text(value)
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


def _own_group(need: str) -> tuple[Path, dict[str, str]]:
    """The control group of this process that has the controller of `need`, and the files of the limit.

    Raises OSError where there is none.
    """
    controller, first, second = _LIMITS[need]
    root = Path("/sys/fs/cgroup")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        if controller in controllers.split(","):
            return root / controller / name.lstrip("/"), first
        own = root / name.lstrip("/")
        if controllers == "" and controller in _words(own / "cgroup.controllers"):
            return own, second
    raise FileNotFoundError(2, f"no control group of this process has a {controller} controller")


def _words(file: Path) -> list[str]:
    return file.read_text().split() if file.exists() else []
