"""Dumps of a job as arrays: all ranks' entries in one table, with shared numbers for groups, operations and sites."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dtobs.flight_recorder.columns import ENTRY_DTYPE
from dtobs.flight_recorder.operations import EntryKind, Operation

DEFAULT_GROUP = "default_pg"
"""PyTorch's description of the group of all ranks."""


@dataclass(frozen=True)
class DumpGroup:
    """A process group. `inferred`: no dump lists its ranks, so they are those seen to issue in it.

    `members`: global ranks, i32[n], by group rank where a dump lists them, else ascending. `size` is larger than their
    number when an all-gather showed that ranks exist of which no dump is there.
    """

    index: int
    name: str
    description: str
    members: npt.NDArray[np.int32]
    inferred: bool
    size: int

    @property
    def label(self) -> str:
        """As a person knows it: its name, and its description where it has one."""
        if self.description in ("", "undefined", self.name):
            return self.name
        return f"{self.name} ({self.description})"


@dataclass(frozen=True)
class RankDump:
    """One usable dump. `taken_ns`: the file's modification time, wall clock; None for a dump from memory."""

    rank: int
    source: str
    version: str
    taken_ns: int | None
    whole: bool  #: False where earlier entries are gone: the ring has wrapped, or was reset
    untracked: dict[int, int] = field(default_factory=dict)  #: group → operations that the recorder only counted
    backends: tuple[str, ...] = ()
    partial: bool = False  #: a further recorder of the rank is not here, as it is of its peers


@dataclass(frozen=True)
class DumpProblem:
    """A file that looked like a dump and could not be used."""

    source: str
    rank: int | None
    message: str

    def __str__(self) -> str:
        return f"{self.source}: {self.message}"


@dataclass(frozen=True)
class Dumps:
    """Everything that was loaded.

    `entries`: ENTRY_DTYPE[n], by rank and record, their group, signature and site indexing `groups`, `operations`
    and `sites`; `row`: i32[n], the position of the entry's rank in `ranks`.
    """

    ranks: tuple[RankDump, ...]
    entries: npt.NDArray[np.void]
    row: npt.NDArray[np.int32]
    groups: tuple[DumpGroup, ...]
    operations: tuple[Operation, ...]
    sites: tuple[str, ...]
    problems: tuple[DumpProblem, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def rank_numbers(self) -> npt.NDArray[np.int32]:
        """i32[ranks], ascending."""
        return np.array([dump.rank for dump in self.ranks], np.int32)

    @cached_property
    def bounds(self) -> list[int]:
        """The entries of row r are ``entries[bounds[r] : bounds[r + 1]]``."""
        rows = np.arange(len(self.ranks) + 1, dtype=self.row.dtype)  # of another type, numpy would copy the table
        return [int(place) for place in np.searchsorted(self.row, rows)]

    def rank_at(self, group: int, place: int) -> int:
        """The rank with this number in a group; −1 where the dumps do not tell."""
        listed = self._places.get(group)
        if listed is not None:
            return listed.get(place, -1)
        members = self.groups[group].members
        return int(members[place]) if place < len(members) else -1

    @cached_property
    def _places(self) -> dict[int, dict[int, int]]:
        """Of groups whose ranks no dump lists and that send: who has which number, by their own sends and receives.

        The ranks that were seen stand for all of them only where these numbers agree with it.
        """
        entries = self.entries
        inferred = np.array([group.inferred for group in self.groups] or [False])
        sent = (entries["kind"] == EntryKind.SEND) | (entries["kind"] == EntryKind.RECV)
        halves = np.flatnonzero(sent & inferred[entries["group"]]) if len(entries) else np.zeros(0, np.int64)
        group, source, target = (entries[name][halves] for name in ("group", "source", "target"))
        own = np.where(entries["kind"][halves] == EntryKind.SEND, source, target)
        told = np.unique(np.stack([group, own, self.rank_numbers[self.row[halves]]]), axis=1)
        found: dict[int, dict[int, int]] = {}
        for index, place, rank in told.T.tolist():
            places = found.setdefault(index, {})
            places[place] = -1 if place in places else rank
        for index, places in found.items():
            inside = group == index
            members = dict(enumerate(self.groups[index].members.tolist()))
            if max(source[inside].max(), target[inside].max()) < len(members) and places.items() <= members.items():
                found[index] = members
        return found

    @property
    def world_size(self) -> int:
        """Ranks known to exist: by the groups, and by the largest rank seen."""
        known = [dump.rank + 1 for dump in self.ranks]
        known += [int(g.members.max()) + 1 for g in self.groups if len(g.members)]
        known += [g.size for g in self.groups]
        known += [p.rank + 1 for p in self.problems if p.rank is not None]
        return max(known, default=0)

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks known to exist of which there is no usable dump."""
        here = {dump.rank for dump in self.ranks}
        return tuple(r for r in range(self.world_size) if r not in here)


def empty_entries() -> npt.NDArray[np.void]:
    """A table without rows."""
    return np.zeros(0, ENTRY_DTYPE)


@dataclass(frozen=True)
class SourceFile:
    """A file named like a dump. `series`: the word before the rank in its name, as ``rank_``."""

    path: Path
    rank: int
    taken_ns: int
    series: str
