"""A capture: what the monitor gathered at the moment of a stall, kept under ``captures/<UTC time>/``.

``capture.json`` (when, why, and per rank process state and whether its GIL answered), and per rank
``rank-00000.stacks.txt`` and ``rank-00000.fr.json`` (the Flight Recorder dump, where it answered).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from dtobs.errors import RecordingDisabled, TargetError
from dtobs.host.process import ProcessState
from dtobs.host.stacks import ThreadStack, parse_stacks
from dtobs.recording.rundir import private_folder, read_json, write_json

Gil = Literal["free", "held", "unknown"]
SCHEMA = "dtobs.capture/1"


@dataclass(frozen=True)
class RankCapture:
    """What was seen of one rank. `gil` is "held" when native code answered and Python did not."""

    rank: int
    process: ProcessState
    gil: Gil = "unknown"
    stacks_text: str = ""
    flight_recorder: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()

    @cached_property
    def stacks(self) -> list[ThreadStack]:
        """The stacks, parsed."""
        return parse_stacks(self.stacks_text)


@dataclass(frozen=True)
class Capture:
    """All ranks of a node (or of several, when merged) at one moment."""

    taken_ns: int  #: monotonic, of the capturing host
    taken_utc: str
    reason: str
    ranks: dict[int, RankCapture] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write the capture to `folder`. Raises RecordingDisabled."""
        try:
            private_folder(folder)
            for rank, seen in self.ranks.items():
                if seen.stacks_text:
                    _private(folder / f"rank-{rank:05d}.stacks.txt", seen.stacks_text)
                if seen.flight_recorder is not None:
                    _private(folder / f"rank-{rank:05d}.fr.json", json.dumps(seen.flight_recorder))
        except OSError as error:
            raise RecordingDisabled(f"cannot write the capture {folder}: {error.strerror}") from error
        summary: dict[str, Any] = {
            "schema": SCHEMA,
            "taken_ns": self.taken_ns,
            "taken_utc": self.taken_utc,
            "reason": self.reason,
            "ranks": {
                str(r): {"process": c.process.to_json(), "gil": c.gil, "notes": list(c.notes)}
                for r, c in self.ranks.items()
            },
        }
        write_json(folder / "capture.json", summary)  # last: a capture without it is unfinished


def load_capture(folder: Path) -> Capture:
    """Read a capture back. Raises TargetError when `folder` holds none or a damaged one."""
    summary = read_json(folder / "capture.json")
    if not summary:
        raise TargetError(f"{folder} holds no finished capture (no capture.json)")
    try:
        ranks = {int(rank): _rank(folder, int(rank), seen) for rank, seen in summary["ranks"].items()}
        return Capture(int(summary["taken_ns"]), str(summary["taken_utc"]), str(summary["reason"]), ranks)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise TargetError(f"{folder}/capture.json is damaged: {error}") from error


def _rank(folder: Path, rank: int, seen: dict[str, Any]) -> RankCapture:
    notes = tuple(str(note) for note in seen.get("notes", ()))
    if seen["gil"] not in get_args(Gil):
        raise ValueError(f"gil {seen['gil']!r}")
    recorder = None
    try:
        recorder = read_json(folder / f"rank-{rank:05d}.fr.json") or None
    except TargetError as error:  # the rest of the capture is still worth having
        notes += (str(error),)
    stacks = _text(folder / f"rank-{rank:05d}.stacks.txt")
    return RankCapture(rank, ProcessState.from_json(seen["process"]), seen["gil"], stacks, recorder, notes)


def latest_capture(folder: Path) -> Capture | None:
    """The newest finished capture below `folder` (RUN_DIR/captures), None when there is none.

    Raises TargetError when that one is damaged.
    """
    try:
        names = sorted((p.name for p in folder.iterdir() if (p / "capture.json").is_file()), reverse=True)
    except OSError:
        return None
    return load_capture(folder / names[0]) if names else None


def _private(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
