"""Times of several hosts on one axis."""

from __future__ import annotations

import numpy as np

from dtobs.recording.view import RunView

_SAME_HOST_NS = 5_000_000_000
"""Monotonic clocks of two hosts started further apart than this."""


def to_common_clock(view: RunView) -> dict[int, int]:
    """By rank: what to add to its monotonic times so that those of all ranks compare.

    Zero on one host, whose monotonic clock is one; across hosts UTC brings them together, as well as it is kept.
    """
    offsets = view.pages["clock_offset_ns"].astype(np.int64)
    if not len(offsets) or int(offsets.max()) - int(offsets.min()) < _SAME_HOST_NS:
        return dict.fromkeys(view.ranks, 0)
    return {rank: int(offset - offsets[0]) for rank, offset in zip(view.ranks, offsets, strict=True)}
