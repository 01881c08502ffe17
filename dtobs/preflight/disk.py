"""How much room the folder of the runs has, and how fast it takes what is written."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from dtobs.preflight.model import Disk

WRITE_BYTES = 32 << 20
WRITE_SECONDS = 1.0
"""Writing stops at whichever comes first."""
_CHUNK = 1 << 20
_SYNCS = 8


def measure(folder: Path) -> Disk:
    """Write a file next to where runs will be, and remove it. Never raises OSError: what failed is in `error`."""
    existing = _existing(folder.absolute())
    try:
        usage = shutil.disk_usage(existing)
    except OSError as error:
        return Disk(str(folder), "", 0, 0, error=f"cannot be looked at: {error.strerror}")
    told = Disk(str(folder), _filesystem(existing), usage.free, usage.total)
    try:
        # Unnamed where the file system can, so that nothing is left behind by a kill.
        with tempfile.TemporaryFile(dir=existing, prefix=".dtobs-preflight-") as file:
            speed = _write(file.fileno())
            sync = _sync(file.fileno())
    except OSError as error:
        return Disk(told.path, told.filesystem, told.free_bytes, told.total_bytes, error=_words(error))
    return Disk(told.path, told.filesystem, told.free_bytes, told.total_bytes, speed, sync)


def _existing(path: Path) -> Path:
    """The nearest folder above that is there: the run directory itself is made later."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _write(fd: int) -> float:
    """Bytes a second that reach the disk, fsync included."""
    chunk = os.urandom(_CHUNK)  # some file systems compress, and zeros would flatter them
    begin = time.monotonic()
    written = 0
    while written < WRITE_BYTES and time.monotonic() - begin < WRITE_SECONDS:
        written += os.write(fd, chunk)
    os.fsync(fd)
    return written / (time.monotonic() - begin)


def _sync(fd: int) -> float:
    taken = []
    for _ in range(_SYNCS):
        begin = time.monotonic()
        os.pwrite(fd, b"\0" * 4096, 0)
        os.fsync(fd)
        taken.append(time.monotonic() - begin)
    return sorted(taken)[_SYNCS // 2]


def _words(error: OSError) -> str:
    return f"cannot be written: {error.strerror or error}"


def _filesystem(path: Path) -> str:
    """The type of the file system that `path` is on, "" when the kernel does not say."""
    try:
        lines = Path("/proc/self/mounts").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    best, kind = "", ""
    for line in lines:
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        mounted = fields[1].replace("\\040", " ")
        if len(mounted) >= len(best) and path.is_relative_to(mounted):
            best, kind = mounted, fields[2]
    return kind
