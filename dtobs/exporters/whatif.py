"""Samples about what slowness costs: the last steps against the same operations made equal."""

from __future__ import annotations

from collections.abc import Iterator

from dtobs.exporters.look import MonitorSnapshot
from dtobs.exporters.sources import Sample


def by_stage(look: MonitorSnapshot) -> Iterator[Sample]:
    if look.whatif is not None and len(look.whatif.by_stage) > 1:
        for stage, value in look.whatif.by_stage.items():
            yield (str(stage),), value


def returned(look: MonitorSnapshot) -> Iterator[Sample]:
    if look.whatif is not None:
        for fix, value in look.whatif.fix.items():
            yield (fix,), value
