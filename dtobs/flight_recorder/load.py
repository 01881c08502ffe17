"""Loading: a folder of dumps, or dumps already decoded, into one `Dumps`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dtobs.errors import DumpError, TargetError
from dtobs.flight_recorder.columns import RankColumns, columns_of
from dtobs.flight_recorder.decode import MAX_BYTES
from dtobs.flight_recorder.groups import DumpGroups
from dtobs.flight_recorder.model import DumpGroup, DumpProblem, Dumps, RankDump, SourceFile, empty_entries
from dtobs.flight_recorder.names import NAMES, find_dumps
from dtobs.flight_recorder.operations import EntryKind, Operation
from dtobs.flight_recorder.reader import read_all

_NAMES_SHOWN = 4
_BESIDE_NS = 600 * 10**9
"""Dumps of one process's recorders are written together; an older one is of another run."""


def load_dumps(folder: Path, *, children: int | None = None, max_bytes: int = MAX_BYTES) -> Dumps:
    """Load every dump of `folder`, by child processes with bounded memory and time.

    A dump that cannot be used becomes a `DumpProblem`, a file that is only named like one a note, and the others are
    used. Raises TargetError when the folder holds no file named like a dump, or when none of them can be used.
    """
    found = find_dumps(folder)
    if not found:
        raise TargetError(f"{folder} holds no Flight Recorder dump: {NAMES}")
    builder = _Builder()
    first = [files[0] for files in found.values()]
    refused = builder.add_files(first, read_all([f.path for f in first], children, max_bytes))
    spare = [f for files in found.values() for f in files[1:] if builder.may_need(f)]
    results = sorted(read_all([f.path for f in spare], children, max_bytes), key=itemgetter(0))
    refused |= builder.add_files(spare, results)
    if not builder.parts:
        file = min(refused, key=lambda f: (f.rank, f.path.name))
        raise TargetError(
            f"none of the {len(refused)} dumps in {folder} can be used. The first: {file.path}: {refused[file]}"
        )
    builder.explain([f for files in found.values() for f in files], refused)
    return builder.build()


def dumps_from_objects(objects: Mapping[int, Any], taken_ns: Mapping[int, int] | None = None) -> Dumps:
    """Dumps already decoded, by rank: a capture's, or synthetic ones. Raises DumpError naming the rank."""
    builder = _Builder()
    for rank, value in objects.items():
        try:
            builder.add(rank, columns_of(value), f"rank {rank}", (taken_ns or {}).get(rank))
        except DumpError as error:
            raise DumpError(f"the dump of rank {rank}: {error}") from error
    return builder.build()


@dataclass
class _Builder:
    """Interns what the dumps share, as they come in any order."""

    parts: dict[int, tuple[RankDump, npt.NDArray[np.void]]] = field(default_factory=dict)
    problems: list[DumpProblem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _joined: Counter[int] = field(default_factory=Counter)  #: rank → how many further recorders
    _silent: Counter[int] = field(default_factory=Counter)  #: rank → how many of them without a call
    _sources: set[str] = field(default_factory=set)  #: their files
    _operations: dict[Operation, int] = field(default_factory=dict)
    _sites: dict[str, int] = field(default_factory=dict)
    _groups: DumpGroups = field(default_factory=DumpGroups)

    def add_files(
        self, files: Sequence[SourceFile], results: Iterable[tuple[int, RankColumns | DumpError]]
    ) -> dict[SourceFile, str]:
        """Add what was read of `files`, returns why others cannot be used.

        That is the first of each rank that can be used, and what another recorder of the same process wrote then: a
        process that trains over NCCL and writes checkpoints over Gloo has two.
        """
        refused = {}
        for index, result in results:
            file = files[index]
            if isinstance(result, DumpError):
                refused[file] = str(result)
            elif file.rank not in self.parts:
                self.add(file.rank, result, str(file.path), file.taken_ns)
            elif result.backends and not {*result.backends} & {*self.parts[file.rank][0].backends}:
                self._join(file, result)
            elif not len(result.entries):
                self._silent[file.rank] += 1
        return refused

    def may_need(self, file: SourceFile) -> bool:
        """Whether a rank has no dump yet, or one of the time of this file."""
        dump = self.parts[file.rank][0] if file.rank in self.parts else None
        return dump is None or dump.taken_ns is None or abs(file.taken_ns - dump.taken_ns) < _BESIDE_NS

    def _join(self, file: SourceFile, columns: RankColumns) -> None:
        """Add what a further recorder of a rank holds, in the order in which the calls were made."""
        dump, entries = self.parts[file.rank]
        self.add(file.rank, columns, str(file.path), file.taken_ns)
        other, theirs = self.parts[file.rank]
        both = np.concatenate([entries, theirs])
        both = both[np.argsort(both["created_ns"], kind="stable")]
        both["record"] = np.arange(len(both))
        self.parts[file.rank] = (
            replace(
                dump,
                whole=dump.whole and other.whole,
                untracked={**other.untracked, **dump.untracked},
                backends=tuple(sorted({*dump.backends, *other.backends})),
            ),
            both,
        )
        self._joined[file.rank] += 1
        self._sources.add(str(file.path))

    def explain(self, files: Sequence[SourceFile], refused: Mapping[SourceFile, str]) -> None:
        """Say what became of the files that are not used.

        Named like the dumps that are used, it is a dump and its rank exists. Anything else only ends in a number.
        """
        used = self._sources | {dump.source for dump, _ in self.parts.values()}
        series = {f.series for f in files if str(f.path) in used}
        first = {f.rank: f for f in reversed(files)}
        spare = {f for f in refused if f is not first[f.rank] and f.rank in self.parts}
        others = [f.path.name for f in refused if f.series not in series and f not in spare]
        for file, message in refused.items():
            if file.series in series and file not in spare:
                self.problems.append(DumpProblem(str(file.path), file.rank, message))
        if others:
            self.notes.append(f"not taken for dumps (unreadable, and named unlike those read): {_some(others)}")
        unread: dict[int, list[str]] = {}
        for file in files:
            if str(file.path) not in used and (file not in refused or file in spare):
                unread.setdefault(file.rank, []).append(file.path.name)
        for rank, names in unread.items():
            name = Path(self.parts[rank][0].source).name
            self.notes.append(f"rank {rank} has several files: {name} is used, not {_some(names)}")

    def add(self, rank: int, columns: RankColumns, source: str, taken_ns: int | None) -> None:
        entries = columns.entries.copy()
        operations = [_operation(row) for row in columns.signatures]
        entries["signature"] = _number(self._operations, operations)[entries["signature"]]
        # the last place stands for −1: an entry without a call site
        entries["site"] = np.append(_number(self._sites, columns.sites), np.int32(-1))[entries["site"]]
        groups = np.array(
            [self._groups.add(name, text, columns.memberships.get(name, "")) for name, text in columns.groups],
            np.int32,
        )
        entries["group"] = groups[entries["group"]] if len(groups) else 0
        for name, ranks_text in columns.memberships.items():
            self._groups.add(name, "", ranks_text)  # a group this rank belongs to and never used
        self.parts[rank] = (
            RankDump(
                rank,
                source,
                columns.version,
                taken_ns,
                columns.whole,
                {int(groups[g]): count for g, count in columns.untracked.items()},
                tuple(columns.backends),
            ),
            entries,
        )

    def build(self) -> Dumps:
        ordered = [self.parts[rank] for rank in sorted(self.parts)]
        lengths = [len(entries) for _, entries in ordered]
        entries = np.concatenate([e for _, e in ordered]) if ordered else empty_entries()
        row = np.repeat(np.arange(len(ordered), dtype=np.int32), lengths)
        target = self._groups.renumbering()
        if len(entries):
            entries["group"] = target[entries["group"]]
        ranks = np.array([dump.rank for dump, _ in ordered], np.int32)
        # Numbers in an order of their own, not in that of the files: ties must not depend on it.
        operations = tuple(sorted(self._operations, key=astuple))
        sites = tuple(sorted(self._sites))
        entries["signature"] = _renumber(self._operations, operations)[entries["signature"]]
        entries["site"] = np.append(_renumber(self._sites, sites), np.int32(-1))[entries["site"]]
        issued, sizes = _evidence(entries, row, ranks, operations, len(target))
        everyone = {*map(int, ranks), *(p.rank for p in self.problems if p.rank is not None)}
        resolved = self._groups.resolve(issued, sizes, everyone)
        most = max(self._joined.values(), default=0)
        return Dumps(
            ranks=tuple(
                replace(
                    dump,
                    untracked={int(target[g]): n for g, n in dump.untracked.items()},
                    partial=self._joined[dump.rank] + self._silent[dump.rank] < most,
                )
                for dump, _ in ordered
            ),
            entries=entries,
            row=row,
            groups=_apart(resolved, entries),
            operations=operations,
            sites=sites,
            problems=tuple(sorted(self.problems, key=lambda p: (p.rank or 0, p.source))),
            notes=tuple(self.notes),
        )


def _apart(groups: tuple[DumpGroup, ...], entries: npt.NDArray[np.void]) -> tuple[DumpGroup, ...]:
    """The groups, and one more for each that two backends serve: both count their calls from 1. Changes `entries`."""
    called = entries["kind"] == EntryKind.COLLECTIVE
    on_host = entries["on_host"] > 0
    both = np.intersect1d(entries["group"][called & on_host], entries["group"][called & ~on_host])
    for index in both.tolist():
        shared = groups[index]
        description = f"{shared.description}, on the host" if shared.description else "on the host"
        entries["group"][on_host & (entries["group"] == index)] = len(groups)
        groups = (*groups, replace(shared, index=len(groups), description=description))
    return groups


def _some(names: Sequence[str]) -> str:
    """The first few of `names`, in order, and how many more there are."""
    shown = ", ".join(sorted(names)[:_NAMES_SHOWN])
    return f"{shown} and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else shown


def _number(table: dict[Any, int], values: Iterable[Any]) -> npt.NDArray[np.int32]:
    return np.array([table.setdefault(value, len(table)) for value in values], np.int32)


def _renumber(table: dict[Any, int], ordered: Sequence[Any]) -> npt.NDArray[np.int32]:
    """i32[values]: from the numbers of `table` to positions in `ordered`."""
    position = {value: i for i, value in enumerate(ordered)}
    return np.array([position[value] for value in table], np.int32)


def _operation(row: list[Any]) -> Operation:
    name, sizes_in, types_in, sizes_out, types_out = row
    return Operation(name, tuple(map(tuple, sizes_in)), tuple(types_in), tuple(map(tuple, sizes_out)), tuple(types_out))


def _evidence(
    entries: npt.NDArray[np.void],
    row: npt.NDArray[np.int32],
    ranks: npt.NDArray[np.int32],
    operations: tuple[Operation, ...],
    groups: int,
) -> tuple[list[npt.NDArray[np.int32]], list[int]]:
    """Per group: the ranks that issued in it, and its size as its operations betray it (0: they do not)."""
    pairs = np.unique(entries["group"].astype(np.int64) * max(len(ranks), 1) + row)
    group_of, row_of = pairs // max(len(ranks), 1), pairs % max(len(ranks), 1)
    issued = np.split(ranks[row_of], np.searchsorted(group_of, np.arange(1, groups)))
    betrayed = np.array([op.group_size or 0 for op in operations] or [0], np.int64)
    sizes = np.zeros(groups, np.int64)
    if len(entries):
        np.maximum.at(sizes, entries["group"], betrayed[entries["signature"]])
    return issued, [int(s) for s in sizes]
