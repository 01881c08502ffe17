"""Process groups of a job from what its dumps say of them, and repaired where they say nothing.

Gloo writes an empty group table, so there the members are the ranks seen to issue in the group; an all-gather or a
reduce-scatter betrays how many there are in truth. Two groups of one name and different ranks are different groups.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import numpy.typing as npt

from dtobs.codec import DecodeError, decode, parse
from dtobs.flight_recorder.model import DEFAULT_GROUP, DumpGroup
from dtobs.flight_recorder.operations import MAX_WORLD

_Key = tuple[str, str]  # a name, and the text of its ranks ("" when no dump has it)


@dataclass
class DumpGroups:
    """Numbers groups while dumps come in; `groups` are resolved at the end."""

    _index: dict[_Key, int] = field(default_factory=dict)
    _descriptions: list[str] = field(default_factory=list)
    _listed: dict[str, set[str]] = field(default_factory=dict)

    def add(self, name: str, description: str, ranks_text: str) -> int:
        """The number of the group that a dump calls `name`, whose ranks it gives as `ranks_text` ("" for none)."""
        key = (name, ranks_text if _parse(ranks_text, self) else "")
        if key not in self._index:
            self._index[key] = len(self._index)
            self._descriptions.append(description)
            if key[1]:
                self._listed.setdefault(name, set()).add(key[1])
        index = self._index[key]
        self._descriptions[index] = self._descriptions[index] or description
        return index

    def renumbering(self) -> npt.NDArray[np.int32]:
        """i32[groups]: from the numbers that `add` gave to those of `resolve`, which are in order of names.

        A group without ranks becomes the one of its name that has them, where there is just one.
        """
        final = {key: position for position, key in enumerate(self._ordered())}
        target = np.zeros(len(self._index), np.int32)
        for key, index in self._index.items():
            listed = self._listed.get(key[0], set())
            merged = not key[1] and len(listed) == 1
            target[index] = final[key[0], next(iter(listed))] if merged else final[key]
        return target

    def _ordered(self) -> list[_Key]:
        return sorted(self._index, key=lambda key: (len(key[0]), key))

    def resolve(
        self, issued: list[npt.NDArray[np.int32]], sizes: list[int], everyone: set[int]
    ) -> tuple[DumpGroup, ...]:
        """Find the members of every group of the dumps.

        `issued[g]`: ranks seen to issue in group g; `sizes[g]`: its size as its operations betray it, 0 when they do
        not; `everyone`: all ranks known to exist.
        """
        groups = []
        for index, (name, text) in enumerate(self._ordered()):
            description = self._descriptions[self._index[name, text]]
            members = _parse(text, self)
            inferred = not members
            if inferred:
                seen = {int(r) for r in issued[index]}
                if description == DEFAULT_GROUP:
                    seen |= set(range(max(everyone, default=-1) + 1))
                members = tuple(sorted(seen))
            array = np.array(members, np.int32)
            size = max(len(array), sizes[index]) if inferred else len(array)
            groups.append(DumpGroup(index, name, description, array, inferred, size))
        return tuple(groups)

    _parsed: dict[str, tuple[int, ...]] = field(default_factory=dict)


def _parse(text: str, table: DumpGroups) -> tuple[int, ...]:
    """Ranks in ``[0, 1, 2]``, in that order, which is that of group ranks; empty when the text is something else."""
    known = table._parsed.get(text)
    if known is None:
        known = table._parsed[text] = _ranks(text)
    return known


def _ranks(text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(decode(list[Annotated[int, range(MAX_WORLD)]], parse(text))))
    except DecodeError:
        return ()
