"""The collective calls of all ranks side by side, as columns, whatever source they come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class CallTable:
    """Columns of one length, in order of group, sequence number and rank.

    Equal numbers in `op` are the same operation, in `site` the same line. `start`: where the rows of each call begin,
    which are those of all ranks under one sequence number of a group.
    """

    group: npt.NDArray[Any]
    seq: npt.NDArray[Any]
    rank: npt.NDArray[Any]
    op: npt.NDArray[Any]
    site: npt.NDArray[Any]
    start: npt.NDArray[np.int64]

    @property
    def end(self) -> npt.NDArray[np.int64]:
        """Where the rows of each call end."""
        return np.append(self.start[1:], len(self.group))

    def rows(self, group: int, first: int, last: int) -> slice:
        """The rows of the calls `first` to `last` of a group."""
        low, high = np.searchsorted(self.group, [group, group + 1])
        inside = low + np.searchsorted(self.seq[low:high], [first, last + 1])
        return slice(int(inside[0]), int(inside[1]))

    def seqs(self, group: int) -> npt.NDArray[Any]:
        """The sequence numbers of a group of which there are rows, ascending."""
        return np.unique(self.seq[slice(*np.searchsorted(self.group, [group, group + 1]))])

    def differing(self, column: npt.NDArray[Any]) -> Iterator[slice]:
        """The rows of each call whose ranks have different values in `column`, in order."""
        if len(column):
            ends = self.end
            for call in np.flatnonzero(self._differs(column)):
                yield slice(int(self.start[call]), int(ends[call]))

    def usual(self, column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The most frequent value of each call, the smallest of them in a tie."""
        result, ends = np.minimum.reduceat(column, self.start), self.end
        for call in np.flatnonzero(self._differs(column)):
            counts = Counter(column[self.start[call] : ends[call]].tolist())
            result[call] = min(counts, key=lambda value: (-counts[value], value))
        return np.asarray(result)

    @cached_property
    def issued(self) -> dict[tuple[int, int], int]:
        """The last sequence number of each (group, rank) that has rows."""
        order = np.lexsort((self.seq, self.rank, self.group))
        group, rank, seq = self.group[order], self.rank[order], self.seq[order]
        last = np.append(begins(group, rank)[1:], len(order))[: len(order)] - 1
        return {
            (g, r): s for g, r, s in zip(group[last].tolist(), rank[last].tolist(), seq[last].tolist(), strict=True)
        }

    def _differs(self, column: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        return np.asarray(np.minimum.reduceat(column, self.start) != np.maximum.reduceat(column, self.start))


def begins(*columns: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Where a row differs from the one before it in one of `columns`."""
    new = np.ones(len(columns[0]), bool)
    new[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return np.flatnonzero(new)
