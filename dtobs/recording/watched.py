"""Whether a monitor that watched a run has ended without a word, by a kill for example."""

from __future__ import annotations

import fcntl
import os

from dtobs.errors import TargetError
from dtobs.recording.rundir import RunDirectory, read_json


def monitor_gone(run: RunDirectory, node: int) -> bool:
    """Whether the monitor of a node on this host entered itself in monitor.json, did not leave, and is not there.

    A monitor holds ``nodes/<node>/monitor.lock`` as long as it lives, and the kernel releases it however it ends.
    """
    try:
        entry = read_json(run.monitor_json).get(str(node))
    except TargetError:
        return False
    if not isinstance(entry, dict) or entry.get("ended") is not None:
        return False
    try:
        fd = os.open(run.monitor_lock(node), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(fd)
