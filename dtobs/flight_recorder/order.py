"""Whether a rank called in another order than it ever did before, by its own history."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dtobs.flight_recorder.model import Dumps
from dtobs.flight_recorder.operations import Kind


def odd_rows(dumps: Dumps, waits: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Of ranks that wait for each other, given as (row, entry it waits in), those that came there by another order.

    Empty when all of them did, none did, or the history of one is too short to say.
    """
    news = {row: _is_new(dumps, row, entry) for row, entry in waits}
    if None in news.values():
        return ()
    odd = tuple(sorted(row for row, new in news.items() if new))
    return odd if len(odd) < len(news) else ()


def _is_new(dumps: Dumps, row: int, entry: int) -> bool | None:
    """Whether this call never before came so many calls after its group's last one; None without an earlier one."""
    place, same_group = _of_its_group(dumps, row, entry)
    distance = np.diff(place)
    alike = _alike(same_group[1:-1], same_group[-1])
    if not alike.any():
        return None
    return not bool((distance[:-1][alike] == distance[-1]).any())


def came_before(dumps: Dumps, row: int, entry: int) -> bool:
    """Whether this call has already followed the call before it in its group, so that it is the ordinary next one."""
    _, calls = _of_its_group(dumps, row, entry)
    if len(calls) < 3:
        return False
    return bool((_alike(calls[:-2], calls[-2]) & _alike(calls[1:-1], calls[-1])).any())


def _of_its_group(dumps: Dumps, row: int, entry: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.void]]:
    """A rank's collectives of the entry's group up to it: their places among all its entries, and themselves."""
    history = dumps.entries[dumps.bounds[row] : entry + 1]
    place = np.flatnonzero((history["group"] == history["group"][-1]) & (history["kind"] == Kind.COLLECTIVE))
    return place, history[place]


def _alike(calls: npt.NDArray[np.void], call: np.void) -> npt.NDArray[np.bool_]:
    """bool[calls]: the same operation from the same line."""
    return np.asarray((calls["signature"] == call["signature"]) & (calls["site"] == call["site"]))
