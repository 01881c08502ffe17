"""The files that a process writes from their beginning, as the kernel has them in /proc; it notices nothing."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MOST = 1024
"""Open files of one process that are looked at."""
MOST_HANDED_DOWN = 1 << 16
"""Open files of a launcher that are looked at: one that is missed is taken for its ranks' own."""


@dataclass(frozen=True)
class OpenFile:
    """A regular file that is open for writing only, and not for appending; `written` is how far it has got."""

    path: str
    identity: tuple[int, int]  #: device and inode
    written: int


def overwritten_files(pid: int, proc: Path = Path("/proc")) -> Iterator[OpenFile]:
    """Files of process `pid` beyond its standard streams that it writes without appending and has written to.

    Files that are open for reading as well are databases, shared memory and locks: several processes share those.
    """
    folder = proc / str(pid)
    for name in _names(folder / "fd")[:MOST]:
        try:
            flags, position = _info(folder / "fdinfo" / name)
            if flags & os.O_ACCMODE != os.O_WRONLY or flags & os.O_APPEND or not position:
                continue
            place = folder / "fd" / name
            path, found = str(place.readlink()), place.stat()
        except (OSError, ValueError):
            continue  # closed in the meantime
        if stat.S_ISREG(found.st_mode):
            yield OpenFile(path.removesuffix(" (deleted)"), (found.st_dev, found.st_ino), position)


def held_files(pid: int, proc: Path = Path("/proc")) -> set[tuple[int, int]]:
    """Device and inode of every file that `pid` has open: what its children may have inherited."""
    found = set()
    for name in _names(proc / str(pid) / "fd")[:MOST_HANDED_DOWN]:
        try:
            status = (proc / str(pid) / "fd" / name).stat()
        except OSError:
            continue
        found.add((status.st_dev, status.st_ino))
    return found


def _names(folder: Path) -> list[str]:
    try:
        names = (place.name for place in folder.iterdir())
        return sorted((name for name in names if name.isdigit() and int(name) > 2), key=int)
    except OSError:
        return []


def _info(path: Path) -> tuple[int, int]:
    """Flags and position. Raises OSError or ValueError."""
    fields = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    return int(fields.get("flags", "0"), 8), int(fields.get("pos", "0"))
