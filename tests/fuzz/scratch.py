"""Folders for what a target writes for every input: in memory where there is /dev/shm, removed at exit."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path


def scratch(target: str) -> Path:
    """A new empty folder."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{target}-", dir=place))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
