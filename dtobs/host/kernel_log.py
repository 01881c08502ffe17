"""Device errors in the kernel's log: the lines that NVIDIA's driver calls Xid, where this user may read them.

A line reads ``NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python3, GPU has fallen off the bus.``; older drivers
leave out ``PCI:``, the pid, or the name, and write the pid in quotes where nobody knows it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

KERNEL_LOG = Path("/dev/kmsg")
_XID = re.compile(
    r"NVRM: Xid \((?:PCI:)?(?P<device>[0-9a-fA-F:.]+)\): (?P<number>\d+)"
    r"(?:, pid='?(?P<pid>\d+|<unknown>)'?)?(?:, name='?(?P<name>[^,']*)'?)?(?:, )?(?P<text>.*)"
)
XID_NOTE = "kernel log: "
"""How a note of a capture begins that repeats a device error of the rank's process."""
_RECORD_BYTES = 8192
_MAX_RECORDS = 20_000


@dataclass(frozen=True)
class Xid:
    """One device error. `pid` is 0 where the driver did not know whose it was; `seconds` counts since boot."""

    device: str
    number: int
    pid: int
    text: str
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"Xid {self.number} of device {self.device}{f': {self.text}' if self.text else ''}"


def read_xids(log: Path = KERNEL_LOG) -> list[Xid]:
    """Every Xid that the kernel's log still holds, oldest first; [] where it may not be read."""
    return parse_xids(log_records(log))


def parse_xids(records: Iterable[str]) -> list[Xid]:
    """Xids of records as /dev/kmsg hands them out: ``priority,number,microseconds,flags;text``."""
    found = []
    for record in records:
        head, _, text = record.partition(";")
        match = _XID.search(text or head)
        if match is None:
            continue
        fields = head.split(",")
        micros = int(fields[2]) if text and len(fields) > 2 and fields[2].isdecimal() else 0
        pid = match["pid"] or ""
        said = match["text"].splitlines()[0].strip() if match["text"] else ""
        found.append(Xid(match["device"], int(match["number"]), int(pid) if pid.isdecimal() else 0, said, micros / 1e6))
    return found


def log_records(log: Path = KERNEL_LOG) -> list[str]:
    """What the kernel's log still holds, a line each, oldest first; [] where it may not be read."""
    try:
        fd = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    found: list[str] = []
    try:
        while len(found) < _MAX_RECORDS:
            data = os.read(fd, _RECORD_BYTES)
            if not data:
                break
            # The device hands out one record a read; a plain file, in tests and copies, holds many lines.
            found += data.decode(errors="replace").splitlines()
    except OSError:
        pass  # the end of the log; or overwritten while we read: what was read stands
    finally:
        os.close(fd)
    return found
