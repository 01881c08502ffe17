"""Waiting for data: the time inside ``next()`` of a ``torch.utils.data.DataLoader`` iterator."""

from __future__ import annotations

from torch.utils.data import dataloader

from dtobs.events import Phase
from dtobs.probes.base import Probe


class Loader(Probe):
    """Names the data phase without a word from the user; a loader of another kind needs ``session.phase("data")``."""

    name = "loader"
    about_model = False

    def install(self) -> None:
        progress = self.context.progress
        self.around(
            dataloader._BaseDataLoaderIter, "__next__", lambda _loader: progress.begin(Phase.DATA), progress.end
        )
