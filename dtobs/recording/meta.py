"""What the numbers in a recording stand for: one JSON object a line, appended when a number is first used.

File ``ranks/<5-digit rank>/meta-<attempt>.jsonl``. Entries have a type ``t``: ``group``, ``op``, ``site``, ``phase``,
``params``, ``process``, ``exception``, ``probe``, ``policy``, ``layout``, ``pipeline``, ``law``, ``settings``,
``pass``, ``save``, ``written``, ``torn``, ``unloaded``, ``unobserved``, ``lines``, ``loop``. A last line cut by a kill
is left out.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dtobs.codec import DecodeError, decode, encode, parse
from dtobs.errors import RecordingDisabled
from dtobs.host.stacks import Frame, in_package
from dtobs.recording.lines import Lines
from dtobs.recording.rundir import private_folder
from dtobs.words import count, ranks_text

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
        line = f"{encode({'t': type_, **fields})}\n".encode()
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
        return self.description or self.name or f"unnamed ({count(len(self.ranks), 'rank')})"


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
    """A line of the user's code, or one of an installed package with the user's line that led there, its `caller`."""

    file: str
    line: int
    function: str
    caller: str = ""

    def __str__(self) -> str:
        if not self.line:
            return self.file.strip("<>")
        if self.caller:
            return f"{self.caller} (through {in_package(self.file)}:{self.line} in {self.function})"
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Parameter:
    """A row of the parameter table.

    Ranks whose rows have equal `name` and `replica` must hold equal values. An empty `replica` is not compared.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    replica: str = ""

    @property
    def counts(self) -> bool:
        """Whether it is a counter of steps, as batch norms keep: equal on all ranks, whoever trains what."""
        return self.dtype.startswith(("int", "uint", "bool"))


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


@dataclass(frozen=True)
class Save:
    """What became of the saves of checkpoints at one line: how many failed since one did not, and how the last did."""

    function: str
    site: int
    failures: int
    error: str
    ranks: tuple[int, ...]  #: that could not do their part, where the error says so
    step: int
    t_ns: int


@dataclass(frozen=True)
class Torn:
    """A save in another thread than the one that trains, begun in step `step`: `live` tensors of it were being trained.

    The optimizer stepped `times` before it was through.
    """

    path: str
    site: int
    live: int
    step: int
    times: int


@dataclass(frozen=True)
class Unloaded:
    """A state dict of `given` entries of which a module took `taken`, while it lacked `missing`.

    `name` is one that was given and not taken. Without, or with, `prefix` most of those would have been.
    """

    site: int
    given: int
    taken: int
    missing: int
    name: str
    prefix: str
    step: int


@dataclass(frozen=True)
class Written:
    """One file that a rank saved: `device` and `inode` tell which, `begin_ns` and `end_ns` when."""

    path: str
    device: int
    inode: int
    step: int
    begin_ns: int
    end_ns: int


@dataclass(frozen=True)
class Corrupt:
    """A file that is not what was saved: `why`, and whether it was `loaded` all the same."""

    path: str
    why: str
    site: int
    loaded: bool
    step: int
    t_ns: int


@dataclass(frozen=True)
class ForwardEnd:
    """A forward pass that ended in a NaN: `finite` is the last module with a finite input, `entered` the next without.

    `place` counts the operators with parameters before the latter. "" where there is none, or nobody knows. `behind`:
    what followed on all of them was still finite.
    """

    step: int
    finite: str
    entered: str
    place: int
    behind: bool = False


@dataclass(frozen=True)
class Loop:
    """Lines `first` to `last` of a file, in which training goes round; `inner`: of several around it the innermost."""

    file: str
    first: int
    last: int
    inner: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.first}-{self.last}"

    def has(self, frame: Frame) -> bool:
        """Whether a frame of a stack is at one of its lines."""
        return frame.file == self.file and self.first <= frame.line <= self.last


@dataclass(frozen=True)
class Recomputed:
    """A region that a backward computed again with other values than its forward had.

    `difference` is a root mean square over that of what there was; `preserved`: the generators' state was to be kept.
    """

    step: int
    region: str
    difference: float
    preserved: bool


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
    layout: dict[str, Any] = field(default_factory=dict)  #: `probes.layout.ParameterLayout` as JSON
    pipeline: dict[str, Any] = field(default_factory=dict)  #: `plan.Plan` as JSON; the last one watched
    laws: dict[str, dict[str, Any]] = field(default_factory=dict)  #: by name: what the rows of its ring stand for
    settings: list[tuple[int, dict[str, str]]] = field(default_factory=list)  #: (step, fields that changed), in order
    constructions: dict[int, Construction] = field(default_factory=dict)  #: by number
    passes: list[dict[str, int]] = field(default_factory=list)  #: over training data, in order: see `probes.loader`
    saves: dict[tuple[str, int], Save] = field(default_factory=dict)  #: by function and line, those that failed once
    written: list[Written] = field(default_factory=list)  #: whole files, the first of an attempt in order
    corrupt: dict[str, Corrupt] = field(default_factory=dict)  #: by path
    torn: list[Torn] = field(default_factory=list)
    unloaded: list[Unloaded] = field(default_factory=list)
    kept: list[tuple[int, str]] = field(default_factory=list)  #: step and parameter of gradients that nobody zeroed
    nonfinite: dict[str, tuple[int, int]] = field(default_factory=dict)  #: by where a NaN was seen: first step, row
    forward: dict[int, ForwardEnd] = field(default_factory=dict)  #: by step, of forward passes that ended in a NaN
    recomputed: list[Recomputed] = field(default_factory=list)  #: in order
    unobserved: list[dict[str, Any]] = field(default_factory=list)  #: what trains and is not followed
    loops: list[Loop] = field(default_factory=list)  #: in which the program trains
    lines: Lines | None = None  #: at which lines of code it was, when the monitor asked last
    damaged: int = 0  #: lines that could not be understood


def read_meta(path: Path) -> Meta:
    """Read the entries of one rank; a missing file is an empty Meta, damaged lines are counted."""
    meta = Meta()
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES)
    except OSError:
        return meta
    for line in filter(None, data.split(b"\n")):
        try:
            add_entry(meta, decode(dict[str, Any], parse(line)))
        except (DecodeError, KeyError):
            meta.damaged += 1
    return meta


def _layout(e: dict[str, Any]) -> dict[str, Any]:
    """A layout whose fields are of the types that detectors expect. Raises DecodeError."""
    return e | {
        "data_ranks": decode(list[int], e.get("data_ranks") or []),
        "coordinates": decode(dict[str, Any], e.get("coordinates") or {}),
        "stage": decode(int, e.get("stage") or 0),
        "dropout": decode(int, e.get("dropout") or 0),
    }


def add_entry(meta: Meta, e: dict[str, Any]) -> None:
    """Add one entry to `meta`. Raises KeyError or DecodeError when it is not one of ours."""
    match e.get("t"):
        case "group":
            meta.groups[decode(int, e["id"])] = decode(Group, e)
        case "op":
            meta.ops[decode(int, e["id"])] = decode(Op, e)
        case "site":
            meta.sites[decode(int, e["id"])] = decode(Site, e)
        case "phase":
            meta.phases[decode(int, e["id"])] = decode(str, e["name"])
        case "params":
            meta.params = decode(list[Parameter], e["params"])
        case "process":
            meta.process.update(e)
        case "exception":
            meta.exceptions.append(e)
        case "probe":
            meta.probes[decode(str, e["name"])] = e
        case "policy":
            meta.policy.update(e)
        case "layout":
            meta.layout = _layout(e)
        case "pipeline":
            meta.pipeline = e
        case "construction" if "ranks" in e:
            made = decode(Construction, e)
            meta.constructions[made.number] = made
        case "construction":
            number = decode(int, e["number"])
            meta.constructions[number] = replace(meta.constructions[number], state=decode(str, e["state"]))
        case "law":
            meta.laws[decode(str, e["name"])] = e
        case "pass":
            said = {name: e[name] for name in PASS_FIELDS} | {"part": e.get("part", -1)}
            meta.passes.append(decode(dict[str, int | bool], said))
        case "save":
            save = decode(Save, e)
            meta.saves[save.function, save.site] = save
        case "written":
            meta.written.append(decode(Written, e))
        case "corrupt":
            corrupt = decode(Corrupt, e)
            meta.corrupt[corrupt.path] = corrupt
        case "torn":
            meta.torn.append(decode(Torn, e))
        case "unloaded":
            meta.unloaded.append(decode(Unloaded, e))
        case "kept":
            meta.kept.append((decode(int, e["step"]), decode(str, e["parameter"])))
        case "nonfinite":
            meta.nonfinite.setdefault(decode(str, e["seen"]), (decode(int, e["step"]), decode(int, e["row"])))
        case "forward":
            end = decode(ForwardEnd, e)
            if (
                not (known := meta.forward.get(end.step)) or not known.finite
            ):  # of several stages the one where it arose
                meta.forward[end.step] = end
        case "recomputed":
            meta.recomputed.append(decode(Recomputed, e))
        case "unobserved":
            said = {name: decode(str, e[name]) for name in ("what", "why")}
            meta.unobserved.append({**said, "step": decode(int, e["step"])})
        case "loop":
            meta.loops.append(decode(Loop, e))
        case "lines":
            meta.lines = decode(Lines, e)
        case "settings":
            meta.settings.append((decode(int, e["step"]), decode(dict[str, str], e["fields"])))
        case _:
            pass  # written by a newer version; nothing here depends on it
