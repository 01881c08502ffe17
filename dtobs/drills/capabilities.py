"""What a fault needs of this machine: control groups and networks of our own, packet filters, memory; and whether it is
permitted."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dtobs.drills.faults import EXTRA_BYTES, ODD
from dtobs.drills.injectors import keep_nothing
from dtobs.drills.network import enter_network, linked_networks
from dtobs.words import bytes_text

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
_NETWORKS = {"networks": False, "throttled-network": True}
"""By need: whether the link between the two networks is throttled."""
_SPARE = 3
"""The memory that must be available, as a multiple of what a rank takes in addition."""


@dataclass(frozen=True)
class Confinement:
    """Where a rank is to live; picklable."""

    control_group: Path | None = None
    network: str = ""

    def enter(self) -> None:
        """Move this process there, before it has any other thread that matters. Raises OSError."""
        if self.control_group is not None:
            (self.control_group / "cgroup.procs").write_text(str(os.getpid()))
        if self.network:
            enter_network(self.network)


@contextlib.contextmanager
def confined(need: str, name: str, world: int) -> Iterator[Mapping[int, Confinement]]:
    """Where the ranks live in a drill with that need, those that live somewhere of their own; removed at the end.

    A limited group is for the odd rank alone; of two networks the last rank has one and the others share one. Raises
    OSError where it cannot be made.
    """
    if need in _LIMITS:
        with limited_group(need, name) as group:
            yield {ODD: Confinement(control_group=group)}
    elif need in _NETWORKS:
        with linked_networks(throttled=_NETWORKS[need]) as (near, far):
            yield {rank: Confinement(network=far if rank == world - 1 else near) for rank in range(world)}
    else:
        yield {}


def why_unavailable(need: str) -> str:
    """Why this machine does not permit what a fault needs, in words; "" where it does."""
    if need == "packet-filter":
        with socket.socket() as unconnected:
            try:
                keep_nothing(unconnected)
            except OSError as error:
                return f"packet filters on sockets are not permitted here ({error.strerror})"
    elif need == "spare-memory":
        free = _available_bytes()
        if free < _SPARE * EXTRA_BYTES:
            return f"a rank takes {bytes_text(EXTRA_BYTES)} more than its peers, and {bytes_text(free)} are available"
    elif need in _NETWORKS:
        try:
            with linked_networks(throttled=_NETWORKS[need]):
                pass
        except OSError as error:
            return f"no networks with a {'throttled ' * _NETWORKS[need]}link can be made here ({error.strerror})"
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


def _available_bytes() -> float:
    """What processes can take without another having to give it."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return float(fields["MemAvailable"].split()[0]) * 1024


def _words(file: Path) -> list[str]:
    return file.read_text().split() if file.exists() else []
