"""A run as it was before its ranks were told to end: what they call about that is not how the run came to stand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from dtobs.events import Kind
from dtobs.recording.rank import END_SIGNALS
from dtobs.recording.rundir import RunDirectory
from dtobs.recording.view import RunView


def told_ns(view: RunView, rank: int) -> int:
    """When `rank` was told to end, on the axis of the view's times; 0 when it was not, or another signal came after.

    The signals have no times of their own: it is when their file was written last.
    """
    page = view.page(rank)
    path = RunDirectory(view.root).signals(rank, int(page["attempt"]))
    try:
        heard, written = path.read_bytes()[:64].rstrip(b"\0"), path.stat().st_mtime_ns
    except OSError:
        return 0
    return written - int(page["clock_offset_ns"]) if heard and heard[-1] in END_SIGNALS else 0


def until(view: RunView, times: Mapping[int, int]) -> RunView:
    """The view as if each rank of `times` had communicated no more from the time given for it on."""
    kept = {rank: (events := view.events(rank))[events["t_ns"] < t_ns] for rank, t_ns in times.items()}
    pages = view.pages.copy()
    for row, rank in enumerate(view.ranks):
        if rank not in kept:
            continue
        made = kept[rank][kept[rank]["kind"] == Kind.COLLECTIVE][-1:]
        for name in ("group", "seq", "op", "site"):
            pages[f"collective_{name}"][row] = made[name].sum()
        pages["collective_ns"][row] = made["t_ns"].sum()
        waits = kept[rank][np.isin(kept[rank]["kind"], (Kind.WAIT_BEGIN, Kind.WAIT_END))][-1:]
        pages["wait_since_ns"][row] = waits["t_ns"][waits["kind"] == Kind.WAIT_BEGIN].sum()
    return replace(
        view, pages=pages, _events=view._events | kept, _windows={}, _tails={}, _waits={}, shared={}, memo={}
    )
