"""One monitor a node: a lock file that the kernel releases when its holder ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from dtobs.errors import RecordingDisabled


class NodeLock:
    """``nodes/<node>/monitor.lock``, held by `flock`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1

    def acquire(self, patience_seconds: float = 0.0) -> bool:
        """Take the lock, retrying for a while; False when another monitor keeps it. Raises RecordingDisabled."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RecordingDisabled(f"cannot make {self.path}: {error.strerror}") from error
        deadline = time.monotonic() + patience_seconds
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if time.monotonic() >= deadline:
                    os.close(fd)
                    return False
                time.sleep(0.1)
            else:
                self._fd = fd
                return True

    def release(self) -> None:
        """Let the next monitor in."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
