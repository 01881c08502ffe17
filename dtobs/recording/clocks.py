"""Times of several hosts on one axis: monotonic clocks begin when their host does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

ONE_CLOCK_NS = 1_000_000_000
"""Offsets to UTC that differ by less are readings of one clock (or of two that agree well enough)."""
_PAGE_TIMES = ("attach_ns", "heartbeat_ns", "step_begin_ns", "phase_begin_ns", "collective_ns", "wait_since_ns")
_TIMES = frozenset({*_PAGE_TIMES, "t_ns", "begin_ns", "end_ns", "sync_ns", "pipeline_begin_ns", "pipeline_end_ns"})
"""Fields of pages, events, steps and pipeline records that are instants; the other ``_ns`` fields are durations."""


def shift(records: npt.NDArray[np.void], by_ns: int) -> npt.NDArray[np.void]:
    """The records with every instant moved by `by_ns`; 0 stays 0, which says "never". A page keeps its UTC."""
    if not by_ns:
        return records
    moved = records.copy()
    for name in records.dtype.names or ():
        if name in _TIMES:
            moved[name][moved[name] != 0] += by_ns
        elif name == "clock_offset_ns":
            moved[name] -= by_ns
    return moved


def shifts(pages: npt.NDArray[np.void], boot_of: Callable[[int], str], here: str) -> npt.NDArray[np.int64]:
    """int64[R]: what to add to the times of each page's rank so that all compare.

    The axis is that of the first node whose ranks ran in the boot `here`, as `boot_of(rank)` says of a rank, else of
    the first node. Nodes of one boot have one clock, whatever was done to UTC between their starts. All 0 where there
    is one clock. Across hosts UTC brings them together, as well as it is kept.
    """
    offsets = pages["clock_offset_ns"].astype(np.int64)
    if not len(pages) or int(offsets.max()) - int(offsets.min()) < ONE_CLOCK_NS:
        return np.zeros(len(pages), np.int64)
    nodes, first, of = np.unique(pages["node"], return_index=True, return_inverse=True)
    # One number a node: its ranks read one clock, at moments between which UTC may have been corrected a little.
    boots = [boot_of(int(pages["rank"][at])) for at in first]
    known = np.array([int(np.median(offsets[of == boots.index(boots[n])])) for n in range(len(nodes))], np.int64)
    axis = boots.index(here) if here in boots else 0
    return np.asarray((known - known[axis])[of], np.int64)
