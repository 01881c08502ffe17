"""The run directory: where each file is, and ``run.json``.

::

    RUN_DIR/run.json  monitor.json  findings.jsonl  token  profile.json  lines.json
            nodes/00000/{pages.bin, exits.jsonl, monitor.log, lead.json, contact.json, devices.json}
            ranks/00000/{events-0.ring, steps-0.ring, digests-0.ring, pipeline-0.ring, meta-0.jsonl, stacks-0.txt}
            ranks/00000/{stdout.log, stderr.log}
            captures/<UTC time>/   traces/   checkpoints/

The number behind the dash is the attempt: a restart under torchrun is a new attempt in the same run. Everything is
private to the user (0700, 0600).
"""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dtobs.codec import DecodeError, encode, parse
from dtobs.errors import RecordingDisabled, TargetError

RUN_SCHEMA = "dtobs.run/1"
MAX_JSON_BYTES = 256 << 20


@dataclass(frozen=True)
class RunDirectory:
    """Paths inside one run. Nothing is created by asking for a path."""

    root: Path

    @property
    def run_json(self) -> Path:
        return self.root / "run.json"

    @property
    def monitor_json(self) -> Path:
        return self.root / "monitor.json"

    @property
    def findings(self) -> Path:
        return self.root / "findings.jsonl"

    @property
    def token(self) -> Path:
        return self.root / "token"

    @property
    def paused(self) -> Path:
        """As long as a user keeps this file, nothing need move."""
        return self.root / "paused"

    @property
    def captures(self) -> Path:
        return self.root / "captures"

    @property
    def traces(self) -> Path:
        return self.root / "traces"

    def node(self, node: int) -> Path:
        return self.root.joinpath("nodes", f"{node:05d}")

    def pages(self, node: int) -> Path:
        return self.node(node) / "pages.bin"

    def monitor_lock(self, node: int) -> Path:
        """Held by the node's monitor as long as it lives."""
        return self.node(node) / "monitor.lock"

    def exits(self, node: int) -> Path:
        return self.node(node) / "exits.jsonl"

    def excused(self, node: int) -> Path:
        """The file in which the node's monitor keeps the times when no process of the node could run."""
        return self.node(node) / "excused.json"

    def shared_files(self, node: int) -> Path:
        """Files that several ranks of this node wrote over."""
        return self.node(node) / "shared-files.json"

    def devices(self, node: int) -> Path:
        """What the driver said of the devices of this node's ranks."""
        return self.node(node) / "devices.json"

    def lead(self, node: int) -> Path:
        return self.node(node) / "lead.json"

    def contact(self, node: int) -> Path:
        return self.node(node) / "contact.json"

    def rank(self, rank: int) -> Path:
        return self.root.joinpath("ranks", f"{rank:05d}")

    def events(self, rank: int, attempt: int) -> Path:
        return self.ring("events", rank, attempt)

    def steps(self, rank: int, attempt: int) -> Path:
        return self.ring("steps", rank, attempt)

    def digests(self, rank: int, attempt: int) -> Path:
        return self.ring("digests", rank, attempt)

    def pipeline(self, rank: int, attempt: int) -> Path:
        return self.ring("pipeline", rank, attempt)

    def ring(self, name: str, rank: int, attempt: int) -> Path:
        """The ring of that name: events, steps, digests, pipeline, or that of a law (`recording.laws`)."""
        return self.root.joinpath("ranks", f"{rank:05d}", f"{name}-{attempt}.ring")

    def meta(self, rank: int, attempt: int) -> Path:
        return self.root.joinpath("ranks", f"{rank:05d}", f"meta-{attempt}.jsonl")

    def stacks(self, rank: int, attempt: int) -> Path:
        return self.rank(rank) / f"stacks-{attempt}.txt"

    def signals(self, rank: int, attempt: int) -> Path:
        """The numbers of the signals that reached the rank's Python, a byte each, then zeros."""
        return self.rank(rank) / f"signals-{attempt}.bin"

    def nodes(self) -> list[int]:
        """Nodes that have recorded here, in order."""
        return _numbers(self.root / "nodes")

    def ranks(self) -> list[int]:
        """Ranks that have a folder here, in order."""
        return _numbers(self.root / "ranks")

    def unreadable(self) -> list[str]:
        """What of it this user may not read and nobody would miss: without it a run looks healthy or empty."""
        exits = [self.exits(node) for node in self.nodes()]
        paths = (self.findings, self.root / "nodes", self.captures, *exits)
        return [
            f"cannot read {path}: Permission denied, so what it holds is not seen here"
            for path in paths
            if path.exists() and not os.access(path, os.R_OK)
        ]

    def identity(self) -> tuple[int, int] | None:
        """What tells this folder from another one that is made in its place; None where there is none."""
        try:
            found = self.root.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def create(self) -> None:
        """Make the directory, private to the user. Raises RecordingDisabled."""
        try:
            private_folder(self.root)
        except OSError as error:
            raise RecordingDisabled(f"cannot make the run directory {self.root}: {error.strerror}") from error

    def write_run(self, info: dict[str, Any]) -> None:
        """Write run.json whole or not at all. Raises RecordingDisabled."""
        write_json(self.run_json, {"schema": RUN_SCHEMA, **info, "path": str(self.root.absolute())})

    def is_copy(self) -> bool:
        """Whether the run was recorded in another directory that is still there. Raises TargetError."""
        path = self.read_run().get("path")
        try:
            return isinstance(path, str) and not Path(path).samefile(self.root)
        except (OSError, ValueError):  # it was moved, or is on another host
            return False

    def read_run(self) -> dict[str, Any]:
        """run.json, or {} where it was not written (yet). Raises TargetError when it is damaged."""
        return read_json(self.run_json)


def setting(info: Mapping[str, Any], *path: str) -> float | None:
    """A number above zero among the settings in run.json, as ``setting(info, "run", "peak_flops")``; None without."""
    value: Any = info.get("config")
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    return float(value) if good else None


def command_failed(info: Mapping[str, Any]) -> int:
    """The exit code of the command that `dtobs run` observed; 0 where it was 0, or is not known."""
    code = info.get("exit_code")
    return code if isinstance(code, int) and 0 < code < 1 << 16 else 0


def total_steps(info: Mapping[str, Any]) -> int | None:
    """How many steps the run is to take, where run.json says it."""
    said = setting(info, "run", "steps")
    return None if said is None else int(said)


def new_run_path(name: str = "run", base: Path | None = None, now: datetime | None = None) -> Path:
    """``runs/<UTC time>-<name>`` below `base` (default: the working directory)."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
    stamp = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
    return (base or Path.cwd()) / "runs" / f"{stamp}-{safe}"


def private_folder(path: Path) -> None:
    """Make `path` and what is missing above it, mode 0700 each (``mkdir(parents=True)`` leaves those above open).

    Raises OSError.
    """
    missing = [path]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)


def write_private(path: Path, data: bytes) -> None:
    """Replace `path` by `data` whole or not at all, mode 0600. Raises OSError."""
    private_folder(path.parent)
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: dict[str, Any]) -> None:
    """`write_private` of `value` as JSON. Raises RecordingDisabled."""
    try:
        write_private(path, f"{encode(value, indent=1, separators=None)}\n".encode())
    except OSError as error:
        raise RecordingDisabled(f"cannot write {path}: {error.strerror}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`, {} when there is no such file. Raises TargetError when it is not a JSON object."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_JSON_BYTES:
                raise TargetError(f"{path} is too large to be one of ours ({size >> 20} MiB)")
            value = parse(file.read(size + 1))  # no more: room for all of it is made at once
    except FileNotFoundError:
        return {}
    except (OSError, DecodeError) as error:
        raise TargetError(f"{path} cannot be read: {error}. Remove or restore it and try again") from error
    if not isinstance(value, dict):
        raise TargetError(f"{path} does not hold a JSON object. Remove or restore it and try again")
    return value


def _numbers(folder: Path) -> list[int]:
    try:
        return sorted(int(p.name) for p in folder.iterdir() if re.fullmatch(r"\d{5,9}", p.name))
    except OSError:
        return []
