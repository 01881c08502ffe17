"""A capture: what the monitor gathered at the moment of a stall, kept under ``captures/<UTC time>/``.

``capture.json`` (when, why, and per rank process state and whether its GIL answered), and per rank
``rank-00000.stacks.txt`` and ``rank-00000.fr.json`` (the Flight Recorder dump, where it answered).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from dtobs.codec import DecodeError, decode, encode
from dtobs.errors import RecordingDisabled, TargetError
from dtobs.host.process import ProcessState
from dtobs.host.stacks import ThreadStack, parse_stacks
from dtobs.recording.rundir import private_folder, read_json, write_json, write_private

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
    waits_for: str = ""  #: what its main thread waits for in the kernel, see `host.blocked`

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
                    write_private(folder / f"rank-{rank:05d}.stacks.txt", seen.stacks_text.encode(errors="replace"))
                if seen.flight_recorder is not None:
                    write_private(folder / f"rank-{rank:05d}.fr.json", encode(seen.flight_recorder).encode())
        except OSError as error:
            raise RecordingDisabled(f"cannot write the capture {folder}: {error.strerror}") from error
        summary: dict[str, Any] = {
            "schema": SCHEMA,
            "taken_ns": self.taken_ns,
            "taken_utc": self.taken_utc,
            "reason": self.reason,
            "ranks": {
                str(r): {"process": c.process, "gil": c.gil, "notes": c.notes, "waits_for": c.waits_for}
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
        seen = decode(dict[int, dict[str, Any]], summary.get("ranks"))
        given = {str(rank): {**said, "rank": rank} for rank, said in seen.items()}
        capture = decode(Capture, {**summary, "ranks": given})
    except DecodeError as error:
        raise TargetError(f"{folder}/capture.json is damaged: {error}") from error
    return replace(capture, ranks={rank: _with_files(folder, seen) for rank, seen in capture.ranks.items()})


def _with_files(folder: Path, seen: RankCapture) -> RankCapture:
    notes, recorder = seen.notes, None
    try:
        recorder = read_json(folder / f"rank-{seen.rank:05d}.fr.json") or None
    except TargetError as error:  # the rest of the capture is still worth having
        notes += (str(error),)
    stacks = _text(folder / f"rank-{seen.rank:05d}.stacks.txt")
    return replace(seen, stacks_text=stacks, flight_recorder=recorder, notes=notes)


def latest_capture(folder: Path) -> Capture | None:
    """The newest finished capture below `folder` (RUN_DIR/captures), None when there is none.

    Raises TargetError when that one is damaged.
    """
    try:
        names = sorted((p.name for p in folder.iterdir() if (p / "capture.json").is_file()), reverse=True)
    except OSError:
        return None
    return load_capture(folder / names[0]) if names else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
