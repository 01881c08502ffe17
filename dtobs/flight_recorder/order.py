"""Which rank of a circle took another order than it ever did before, by its own history."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

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
    low = dumps.bounds[row]
    history = dumps.entries[low : entry + 1]
    same_group = np.flatnonzero(
        (history["group"] == history["group"][-1]) & (history["kind"] == Kind.COLLECTIVE)
    )
    distance = np.diff(same_group)
    earlier = history[same_group[1:-1]]
    alike = (earlier["signature"] == history["signature"][-1]) & (earlier["site"] == history["site"][-1])
    if not alike.any():
        return None
    return not bool((distance[:-1][alike] == distance[-1]).any())
