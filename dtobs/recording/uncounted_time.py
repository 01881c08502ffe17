"""Time in which a monitor saw that nothing could move, kept for whoever judges the same silence: ``excused.json``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from dtobs.codec import DecodeError, decode
from dtobs.errors import TargetError
from dtobs.recording.rundir import read_json, write_json


@dataclass(frozen=True)
class Excused:
    """A stretch of monotonic time of the host, and the share of it that does not count."""

    begin_ns: int
    end_ns: int
    share: Annotated[float, lambda share: 0 <= share <= 1] = 1.0

    def within_ns(self, since_ns: int, until_ns: int) -> int:
        """What of it lies between two instants."""
        return round(max(0, min(self.end_ns, until_ns) - max(self.begin_ns, since_ns)) * self.share)


def excused_ns(spans: Iterable[Excused], since_ns: int, until_ns: int) -> int:
    """What of the time between two instants does not count; never more than there is."""
    return min(max(0, until_ns - since_ns), sum(span.within_ns(since_ns, until_ns) for span in spans))


def write_excused(path: Path, boot_id: str, spans: Iterable[Excused]) -> None:
    """Replace the file. Raises RecordingDisabled."""
    write_json(path, {"boot_id": boot_id, "spans": list(spans)})


def read_excused(path: Path, boot_id: str) -> tuple[Excused, ...]:
    """What is in the file; nothing where it is not there, is of another boot of the host, or is damaged."""
    try:
        known = read_json(path)
        return decode(tuple[Excused, ...], known.get("spans")) if known.get("boot_id") == boot_id else ()
    except (TargetError, DecodeError):
        return ()
