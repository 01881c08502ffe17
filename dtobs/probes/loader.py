"""Waiting for data: the time inside ``next()`` of a ``torch.utils.data.DataLoader`` iterator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import dataloader

from dtobs.events import Phase
from dtobs.probes.base import Context, Probe
from dtobs.probes.patches import Patches
from dtobs.probes.progress import Progress


class Loader(Probe):
    """Names the data phase without a word from the user; a loader of another kind needs ``session.phase("data")``."""

    name = "loader"
    about_model = False

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self._patches = Patches()

    def install(self, context: Context) -> None:
        begin = context.guard(self, self._begin)
        end = context.guard(self, self._progress.end)

        def make(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
            def __next__(self: Any) -> Any:
                token = begin()
                try:
                    return original(self)
                finally:
                    if token is not None:
                        end(token)

            return __next__

        self._patches.replace(dataloader._BaseDataLoaderIter, "__next__", make)

    def remove(self) -> None:
        self._patches.undo()

    def _begin(self) -> int:
        return self._progress.begin(Phase.DATA)
