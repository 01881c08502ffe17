"""What processes and their children have done so far: processor time, and bytes read and written."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtobs.host.process import kernel_text, process_ids, stat_fields

_TICKS = os.sysconf("SC_CLK_TCK")
_MAX_BELOW = 4096


@dataclass(frozen=True)
class Activity:
    """Sums over one process and all that live below it."""

    cpu_seconds: float
    io_bytes: int


def activities(pids: Iterable[int], proc: Path = Path("/proc")) -> dict[int, Activity]:
    """The activity of each process so far; a process that is gone has none."""
    stats = _stats(proc)
    found = {}
    for pid, family in _families(pids, stats).items():
        cpu = sum(int(ticks) for one in family if one in stats for ticks in stats[one][11:15])
        found[pid] = Activity(cpu / _TICKS, sum(_io(proc / str(one)) for one in family))
    return found


def family_of(pid: int, proc: Path = Path("/proc")) -> list[int]:
    """A process and all that live below it, also those in sessions of their own."""
    return _families([pid], _stats(proc))[pid]


def _families(pids: Iterable[int], stats: Mapping[int, Sequence[str]]) -> dict[int, list[int]]:
    children: dict[int, list[int]] = defaultdict(list)
    for pid, fields in stats.items():
        children[int(fields[1])].append(pid)
    families = {}
    for pid in pids:
        family, at = [pid], 0
        while at < len(family) < _MAX_BELOW:
            family += children.get(family[at], ())
            at += 1
        families[pid] = family
    return families


def _stats(proc: Path) -> dict[int, list[str]]:
    return {pid: fields for pid in process_ids(proc) if (fields := stat_fields(pid, proc, 22))}


def _io(process: Path) -> int:
    lines = kernel_text(process / "io").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar:", "wchar:")))
