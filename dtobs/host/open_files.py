"""The files that a process writes from their beginning, as the kernel has them in /proc; it notices nothing."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_STREAMS = ("0", "1", "2")
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
    """Files of process `pid` beyond its standard streams, and copies of them, that it writes without appending and has
    written to.

    Files that are open for reading as well are databases, shared memory and locks: several processes share those.
    """
    folder = proc / str(pid)
    streams = {found for name in _STREAMS if (found := _identity(folder / "fd" / name)) is not None}
    for name in _names(folder / "fd")[:MOST]:
        try:
            flags, position = _info(folder / "fdinfo" / name)
            if flags & os.O_ACCMODE != os.O_WRONLY or flags & os.O_APPEND or not position:
                continue
            place = folder / "fd" / name
            path, status = str(place.readlink()), place.stat()
        except (OSError, ValueError):
            continue  # closed in the meantime
        if stat.S_ISREG(status.st_mode) and (status.st_dev, status.st_ino) not in streams:
            yield OpenFile(path.removesuffix(" (deleted)"), (status.st_dev, status.st_ino), position)


def held_files(pid: int, proc: Path = Path("/proc")) -> set[tuple[int, int]]:
    """Device and inode of every file that `pid` has open: what its children may have inherited."""
    folder = proc / str(pid) / "fd"
    files = (_identity(folder / name) for name in (*_STREAMS, *_names(folder)[:MOST_HANDED_DOWN]))
    return {found for found in files if found is not None}


def _identity(open_file: Path) -> tuple[int, int] | None:
    try:
        status = open_file.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _names(folder: Path) -> list[str]:
    """What is open beyond the standard streams."""
    try:
        names = (place.name for place in folder.iterdir() if place.name not in _STREAMS)
        return sorted((name for name in names if name.isdigit()), key=int)
    except OSError:
        return []


def _info(path: Path) -> tuple[int, int]:
    """Flags and position. Raises OSError or ValueError."""
    fields = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    return int(fields.get("flags", "0"), 8), int(fields.get("pos", "0"))
