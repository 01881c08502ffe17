"""``monitor.json``: which monitors watch this run and where each can be asked.

``{"<node>": {"address", "pid", "started", "ended", "last_pass"}}``; `address` is None without HTTP and after the end,
`last_pass` a `LastPass` once a rank has closed its recording.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from dtobs.errors import TargetError
from dtobs.recording.rundir import RunDirectory, read_json, write_json
from dtobs.recording.watched import LastPass


def announce(run: RunDirectory, node: int, address: str | None) -> None:
    """Enter this monitor. `address` is ``http://HOST:PORT``, None without HTTP. Raises RecordingDisabled, OSError."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    entry = {"address": address, "pid": os.getpid(), "started": now, "ended": None}
    _change(run, node, entry)


def withdraw(run: RunDirectory, node: int) -> None:
    """Say that this monitor has ended; who watched, and when, stays readable. Raises RecordingDisabled, OSError."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    _change(run, node, {"address": None, "ended": now})


def looked(run: RunDirectory, node: int, last: LastPass) -> None:
    """Say up to when this monitor has looked at the run. Raises RecordingDisabled, OSError."""
    _change(run, node, {"last_pass": vars(last)})


def addresses(run: RunDirectory) -> dict[int, str]:
    """Where the living monitors of this run can be asked, by node. Raises TargetError when the file is damaged."""
    return {
        int(node): str(entry["address"])
        for node, entry in read_json(run.monitor_json).items()
        if node.isdecimal() and isinstance(entry, dict) and entry.get("address")
    }


def _change(run: RunDirectory, node: int, values: dict[str, Any]) -> None:
    with _locked(run):
        try:
            nodes = read_json(run.monitor_json)
        except TargetError:  # damaged by something else: what we know is enough to begin again
            nodes = {}
        before = nodes.get(str(node))
        nodes[str(node)] = {**(before if isinstance(before, dict) else {}), **values}
        write_json(run.monitor_json, nodes)


@contextmanager
def _locked(run: RunDirectory) -> Iterator[None]:
    """Several nodes may share the directory; the lock is beside the file, which is replaced at each change."""
    fd = os.open(run.root / ".monitor.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
