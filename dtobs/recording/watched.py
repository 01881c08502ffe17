"""What a run's monitor says of itself: whether it ended without a word, and up to when it has looked at the run."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from typing import Any

from dtobs.codec import DecodeError, decode
from dtobs.errors import TargetError
from dtobs.recording.rundir import RunDirectory, read_json


@dataclass(frozen=True)
class LastPass:
    """The newest pass of the detectors since a rank closed its recording, as the monitor enters it in monitor.json."""

    attempt: int
    t_ns: int  #: monotonic, of the monitor's host: when the pass began
    whole: bool  #: whether every rank of the run had closed its recording by then


def last_pass(run: RunDirectory, node: int) -> LastPass | None:
    """What the monitor of `node` has looked at last; None before a rank has closed its recording."""
    try:
        return decode(LastPass, _entry(run, node).get("last_pass"))
    except DecodeError:
        return None


def monitor_gone(run: RunDirectory, node: int) -> bool:
    """Whether the monitor of a node on this host entered itself in monitor.json, did not leave, and is not there.

    A monitor holds ``nodes/<node>/monitor.lock`` as long as it lives, and the kernel releases it however it ends.
    """
    entry = _entry(run, node)
    if not entry or entry.get("ended") is not None:
        return False
    return not monitor_lives(run, node)


def monitor_lives(run: RunDirectory, node: int) -> bool:
    """Whether a monitor of a node on this host holds its lock; True as well where the lock cannot be asked for."""
    try:
        fd = os.open(run.monitor_lock(node), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(fd)


def _entry(run: RunDirectory, node: int) -> dict[str, Any]:
    try:
        entry = read_json(run.monitor_json).get(str(node))
    except TargetError:
        return {}
    return entry if isinstance(entry, dict) else {}
