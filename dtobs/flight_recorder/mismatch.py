"""Calls of one (group, sequence number) that do not fit together on all ranks.

`dtobs.calls.agree` says which ranks are odd; with no majority nobody is singled out. Only the first
mismatch of a group is its cause: everything after it is shifted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from dtobs.calls.agree import judge
from dtobs.flight_recorder.align import Aligned
from dtobs.flight_recorder.model import Dumps
from dtobs.flight_recorder.operations import Operation

What = Literal["operation", "dtype", "shape"]


@dataclass(frozen=True)
class Mismatch:
    """The first call of a group on which its ranks do not agree.

    `parties`: for each way the call was made, an entry that shows it and the rows of the ranks that made it so,
    largest party first. `odd_rows`: those outside the majority; empty when there is none.
    """

    what: What
    group: int
    seq: int
    parties: tuple[tuple[int, tuple[int, ...]], ...]
    odd_rows: tuple[int, ...]


def find_mismatches(dumps: Dumps, aligned: Aligned) -> list[Mismatch]:
    """The first mismatch of each group, by group. Pure."""
    if not len(aligned.entry):
        return []
    signature = dumps.entries["signature"][aligned.entry]
    way = _ways(dumps.operations)[signature]
    low = np.minimum.reduceat(way, aligned.start)
    high = np.maximum.reduceat(way, aligned.start)
    ends = aligned.end
    found: dict[int, Mismatch] = {}
    for segment in np.flatnonzero(low != high):
        start, end = int(aligned.start[segment]), int(ends[segment])
        group = int(aligned.group[start])
        if group not in found:
            mismatch = _compare(dumps, aligned, signature, slice(start, end))
            if mismatch is not None:
                found[group] = mismatch
    return [found[group] for group in sorted(found)]


def _ways(operations: tuple[Operation, ...]) -> npt.NDArray[np.int32]:
    """i32[operations]: equal for operations that fit together."""
    numbers: dict[object, int] = {}
    keys = ((op.family, op.dtype_key, op.shape_key) for op in operations)
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int32)


def _compare(dumps: Dumps, aligned: Aligned, signature: npt.NDArray[np.int32], part: slice) -> Mismatch | None:
    operations = dumps.operations
    ways: dict[int, list[int]] = {}
    for position in range(part.start, part.stop):
        ways.setdefault(int(signature[position]), []).append(position)
    what: What
    if len({operations[s].family for s in ways}) > 1:
        what, key = "operation", {s: operations[s].family for s in ways}
    elif len({operations[s].dtype_key for s in ways}) > 1:
        what, key = "dtype", {s: str(operations[s].dtype_key) for s in ways}
    elif len({operations[s].shape_key for s in ways}) > 1:
        what, key = "shape", {s: str(operations[s].shape_key) for s in ways}
    else:
        return None
    entry_of = {int(aligned.row[position]): position for s in ways for position in ways[s]}
    group = int(aligned.group[part.start])
    found = judge({row: key[int(signature[at])] for row, at in entry_of.items()}, dumps.groups[group].size)
    if found is None:
        return None
    shown = tuple((int(aligned.entry[entry_of[rows[0]]]), rows) for rows in found.parties)
    return Mismatch(what, group, int(aligned.seq[part.start]), shown, found.odd if found.majority else ())


def majority_by_segment(values: npt.NDArray[np.int32], aligned: Aligned) -> npt.NDArray[np.int32]:
    """i32[segments]: the most frequent of `values` in each call, the smallest of them in a tie."""
    low = np.minimum.reduceat(values, aligned.start)
    high = np.maximum.reduceat(values, aligned.start)
    ends = aligned.end
    result = low.copy()
    for segment in np.flatnonzero(low != high):
        counts = Counter(values[aligned.start[segment] : ends[segment]].tolist())
        result[segment] = min(counts, key=lambda v: (-counts[v], v))
    return result
