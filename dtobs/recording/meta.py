"""What the numbers in a recording stand for: one JSON object a line, appended when a number is first used.

File ``ranks/<5-digit rank>/meta-<attempt>.jsonl``. Entries have a type ``t``: ``group``, ``op``, ``site``, ``phase``,
``params``, ``process``, ``exception``, ``probe``, ``policy``, ``layout``, ``pipeline``, ``law``, ``settings``,
``pass``. A last line cut by a kill is left out.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dtobs.errors import RecordingDisabled
from dtobs.recording.rundir import private_folder
from dtobs.words import ranks_text

MAX_BYTES = 8 << 20
PASS_FIELDS = ("step", "sampler", "shuffles", "seed", "epoch", "replicas", "samples")


class MetaWriter:
    """Appends entries with one unbuffered write each; stops, and counts, at `MAX_BYTES`.

    Raises RecordingDisabled when the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        try:
            private_folder(path.parent)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC, 0o600)
        except OSError as error:
            raise RecordingDisabled(f"cannot record to {path}: {error.strerror}") from error
        self._close = weakref.finalize(self, os.close, self._fd)  # also when nobody calls close()
        self._written = 0
        self._cut = False  # the last line went to disk in part: the next begins on a line of its own
        self._seen: set[tuple[str, int]] = set()
        self.dropped = 0

    def add(self, type_: str, **fields: Any) -> None:
        """Append one entry. An entry that cannot be written (full disk) is counted in `dropped`, not raised."""
        line = (json.dumps({"t": type_, **fields}, separators=(",", ":"), default=str) + "\n").encode()
        if self._fd < 0 or self._written + len(line) > MAX_BYTES:
            self.dropped += 1
            return
        if self._cut:
            line = b"\n" + line
        try:
            written = os.write(self._fd, line)
        except OSError:
            self.dropped += 1
            return
        self._written += written
        self._cut = written < len(line)
        self.dropped += self._cut

    def define(self, type_: str, id_: int, **fields: Any) -> None:
        """Append the entry that explains `id_`, once."""
        if (type_, id_) not in self._seen:
            self._seen.add((type_, id_))
            self.add(type_, id=id_, **fields)

    def close(self) -> None:
        """Close the file; later entries are dropped."""
        self._close()
        self._fd = -1


@dataclass(frozen=True)
class Group:
    """A process group as a rank saw it."""

    name: str
    ranks: tuple[int, ...]
    description: str = ""
    backend: str = ""

    def __str__(self) -> str:
        return self.description or self.name


@dataclass(frozen=True)
class Op:
    """What a collective call was: everything that its peers' call must agree with."""

    op: str
    reduce_op: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    root: int = -1

    def __str__(self) -> str:
        sizes = ", ".join(f"{d}{list(s)}" for d, s in zip(self.dtypes, self.shapes, strict=False))
        root = f"root {self.root}" if self.root >= 0 else ""
        return f"{self.op}({', '.join(x for x in (self.reduce_op, sizes, root) if x)})"


@dataclass(frozen=True)
class Site:
    """A line of the user's code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}" if self.line else self.file.strip("<>")


@dataclass(frozen=True)
class Parameter:
    """A row of the parameter table.

    Ranks whose rows have equal `name` and `replica` must hold equal values. An empty `replica` is not compared.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    replica: str = ""


@dataclass(frozen=True)
class Construction:
    """A process group that a rank began to make: the `number`-th of the job. `state` is "open", "done" or "failed"."""

    number: int
    ranks: tuple[int, ...]
    name: str
    site: str
    begin_ns: int
    state: str = "open"

    def __str__(self) -> str:
        return f"{self.name or 'a group'} of {ranks_text(self.ranks)}"


@dataclass
class Meta:
    """All entries of one rank, by type."""

    groups: dict[int, Group] = field(default_factory=dict)
    ops: dict[int, Op] = field(default_factory=dict)
    sites: dict[int, Site] = field(default_factory=dict)
    phases: dict[int, str] = field(default_factory=dict)
    params: list[Parameter] = field(default_factory=list)
    process: dict[str, Any] = field(default_factory=dict)
    exceptions: list[dict[str, Any]] = field(default_factory=list)
    probes: dict[str, dict[str, Any]] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)  #: `probes.layout.Layout` as JSON
    pipeline: dict[str, Any] = field(default_factory=dict)  #: `plan.Plan` as JSON; the last one watched
    laws: dict[str, dict[str, Any]] = field(default_factory=dict)  #: by name: what the rows of its ring stand for
    settings: list[tuple[int, dict[str, str]]] = field(default_factory=list)  #: (step, fields that changed), in order
    constructions: dict[int, Construction] = field(default_factory=dict)  #: by number
    passes: list[dict[str, int]] = field(default_factory=list)  #: over training data, in order: see `probes.loader`
    damaged: int = 0  #: lines that could not be understood


def read_meta(path: Path) -> Meta:
    """Read the entries of one rank; a missing file is an empty Meta, damaged lines are counted."""
    meta = Meta()
    for entry in _lines(path, meta):
        try:
            take(meta, entry)
        except (KeyError, TypeError, ValueError, OverflowError):
            meta.damaged += 1
    return meta


def _lines(path: Path, meta: Meta) -> Iterator[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES)
    except OSError:
        return
    for line in data.split(b"\n"):
        if not line:
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            meta.damaged += 1
            continue
        if isinstance(entry, dict):
            yield entry
        else:
            meta.damaged += 1


def _layout(e: dict[str, Any]) -> dict[str, Any]:
    """A layout whose fields are of the types that detectors expect. Raises TypeError or ValueError."""
    checked = {
        "data_ranks": [int(rank) for rank in e.get("data_ranks") or ()],
        "coordinates": dict(e.get("coordinates") or {}),
        "stage": int(e.get("stage") or 0),
        "dropout": int(e.get("dropout") or 0),
    }
    return e | checked


def take(meta: Meta, e: dict[str, Any]) -> None:
    """Add one entry to `meta`. Raises KeyError, TypeError, ValueError or OverflowError when it is not one of ours."""
    match e.get("t"):
        case "group":
            meta.groups[int(e["id"])] = Group(
                str(e["name"]),
                tuple(int(r) for r in e["ranks"]),
                str(e.get("description", "")),
                str(e.get("backend", "")),
            )
        case "op":
            meta.ops[int(e["id"])] = Op(
                str(e["op"]),
                str(e.get("reduce_op", "")),
                tuple(tuple(int(n) for n in shape) for shape in e.get("shapes", ())),
                tuple(str(d) for d in e.get("dtypes", ())),
                int(e.get("root", -1)),
            )
        case "site":
            meta.sites[int(e["id"])] = Site(str(e["file"]), int(e["line"]), str(e["function"]))
        case "phase":
            meta.phases[int(e["id"])] = str(e["name"])
        case "params":
            meta.params = [
                Parameter(str(p["name"]), tuple(int(n) for n in p["shape"]), str(p["dtype"]), str(p["replica"]))
                for p in e["params"]
            ]
        case "process":
            meta.process.update(e)
        case "exception":
            meta.exceptions.append(e)
        case "probe":
            meta.probes[str(e["name"])] = e
        case "policy":
            meta.policy.update(e)
        case "layout":
            meta.layout = _layout(e)
        case "pipeline":
            meta.pipeline = e
        case "construction" if "ranks" in e:
            ranks = tuple(int(r) for r in e["ranks"])
            made = Construction(int(e["number"]), ranks, str(e["name"]), str(e["site"]), int(e["begin_ns"]))
            meta.constructions[made.number] = made
        case "construction":
            number = int(e["number"])
            meta.constructions[number] = replace(meta.constructions[number], state=str(e["state"]))
        case "law":
            meta.laws[str(e["name"])] = e
        case "pass":
            meta.passes.append({name: int(e[name]) for name in PASS_FIELDS})
        case "settings":
            meta.settings.append((int(e["step"]), {str(name): str(value) for name, value in e["fields"].items()}))
        case _:
            pass  # written by a newer version; nothing here depends on it
