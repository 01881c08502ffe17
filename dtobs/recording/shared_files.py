"""Files that several ranks wrote over at one time, as a node's monitor saw them: ``nodes/<node>/shared-files.json``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dtobs.codec import DecodeError, decode
from dtobs.errors import TargetError
from dtobs.recording.rundir import read_json, write_json

MOST = 64


@dataclass(frozen=True)
class SharedFile:
    """One file and the ranks that write to it; `saving`: one of these ranks was writing a checkpoint at that moment."""

    path: str
    ranks: tuple[int, ...]
    attempt: int
    step: int
    since_ns: int  #: monotonic
    saving: bool = False


def write_shared_files(path: Path, found: Iterable[SharedFile]) -> None:
    """Replace the file. Raises RecordingDisabled."""
    write_json(path, {"files": list(found)})


def read_shared_files(path: Path) -> tuple[SharedFile, ...]:
    """What is in the file; nothing where there is none, or where it is damaged."""
    try:
        return decode(tuple[SharedFile, ...], read_json(path).get("files", ()))[:MOST]
    except (TargetError, DecodeError):
        return ()
