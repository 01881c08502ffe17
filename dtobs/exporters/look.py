"""What the metrics are computed from: one look at a run by one node's monitor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dtobs.exporters.monitor_stats import MonitorStats
from dtobs.exporters.totals import StepTotals
from dtobs.findings import Finding
from dtobs.recording.view import RunView
from dtobs.timeline.bubble import Bubble, latest
from dtobs.timeline.whatif import WhatIf, recent


@dataclass(frozen=True)
class MonitorSnapshot:
    """One look of a monitor at its run.

    Values of ranks cover only those of `node`; values of the run come from the node that `leads`.
    """

    view: RunView
    node: int = 0
    leads: bool = True
    findings: Sequence[Finding] = ()
    totals: StepTotals = field(default_factory=StepTotals)
    own: MonitorStats | None = None
    stalled_seconds: float = 0.0  #: how long the present stall lasts; 0 without one
    simulate: Callable[[RunView], WhatIf | None] = recent

    @property
    def run(self) -> str:
        """The name of the run, as its directory is called."""
        return self.view.root.name

    @cached_property
    def pages(self) -> npt.NDArray[np.void]:
        """PAGE_DTYPE[local ranks]: the pages of this node."""
        local: npt.NDArray[np.void] = self.view.pages[self.view.pages["node"] == self.node]
        return local

    @cached_property
    def rank_labels(self) -> list[tuple[str]]:
        """The value of the label ``rank`` for each of `pages`."""
        return [(str(rank),) for rank in self.pages["rank"].tolist()]

    @cached_property
    def bubble(self) -> Bubble | None:
        """The last step of the run's pipeline with the widest bubble; None without pipelines."""
        return latest(self.view)

    @cached_property
    def whatif(self) -> WhatIf | None:
        """The last steps against the same made equal."""
        return self.simulate(self.view) if self.leads else None

    @cached_property
    def utc_seconds(self) -> float:
        """The moment of the look as UTC seconds, by the clock of the ranks."""
        if not len(self.view.pages):
            return 0.0
        return (self.view.now_ns + int(self.view.pages["clock_offset_ns"][0])) / 1e9
