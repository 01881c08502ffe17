"""Samples about pipeline schedules: idle time as measured, as replayed, and as the schedule cannot avoid."""

from __future__ import annotations

from collections.abc import Iterator

from dtobs.exporters.look import MonitorSnapshot
from dtobs.exporters.sources import Sample
from dtobs.timeline.bubble import ideal as schedule_bound
from dtobs.timeline.bubble import recent_shares
from dtobs.timeline.pipeline import pipelines


def measured(look: MonitorSnapshot) -> Iterator[Sample]:
    """Of this node's ranks, each against the time from its pipeline's first computation to the last one."""
    shares = recent_shares(look.view)
    for row in look.pages:
        rank = int(row["rank"])
        if rank in shares:
            yield (str(rank),), shares[rank]


def ideal(look: MonitorSnapshot) -> Iterator[Sample]:
    bounds = [bound for plan in pipelines(look.view) if (bound := schedule_bound(plan)) is not None]
    if look.leads and bounds:
        yield (), max(bounds)
