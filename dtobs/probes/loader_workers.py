"""How long the worker processes of a DataLoader take for a batch.

Each counts in memory that it shares with the process that trains, as it inherits both that memory and the wrapped
``fetch`` when it is forked. Of a worker that is spawned nothing is known.

Private torch: ``torch.utils.data._utils.fetch._MapDatasetFetcher`` and ``_IterableDatasetFetcher``; tried with 2.13.
Without them nothing is known of any.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from torch.utils.data import _utils, get_worker_info

from dtobs.probes import patches

_SLOTS = 256
_KEY, _BATCHES, _NANOSECONDS = range(3)


class LoaderWorkers:
    """A table in shared memory, a row for each worker of each loader; of two that meet in a row the later one stays."""

    def __init__(self) -> None:
        self._table = np.frombuffer(mmap.mmap(-1, _SLOTS * 3 * 8), np.int64).reshape(_SLOTS, 3)

    def watch(self) -> list[patches.Undo]:
        """Have the workers that are forked from now on count; the undo of each hook."""
        fetch: Any = getattr(_utils, "fetch", None)
        kinds = [getattr(fetch, name, None) for name in ("_MapDatasetFetcher", "_IterableDatasetFetcher")]
        return [patches.replace(kind, "fetch", self._counted) for kind in kinds if hasattr(kind, "fetch")]

    def counted(self, dataset: object, workers: int) -> tuple[int, float]:
        """How many batches the `workers` that read `dataset` have made, and the seconds that took them altogether."""
        batches, nanoseconds = 0, 0
        for worker in range(workers):
            row = self._table[_row(dataset, worker)]
            if row[_KEY] == _key(dataset, worker):
                batches += int(row[_BATCHES])
                nanoseconds += int(row[_NANOSECONDS])
        return batches, nanoseconds / 1e9

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        table = self._table

        def fetch(*args: Any) -> Any:
            begin = time.perf_counter_ns()
            batch = original(*args)
            worker = get_worker_info()
            if worker is not None:  # not in the process that trains
                row = table[_row(worker.dataset, worker.id)]
                if row[_KEY] != (key := _key(worker.dataset, worker.id)):
                    row[:] = key, 0, 0
                row[_BATCHES] += 1
                row[_NANOSECONDS] += time.perf_counter_ns() - begin
            return batch

        return fetch


def _key(dataset: object, worker: int) -> int:
    return id(dataset) + worker


def _row(dataset: object, worker: int) -> int:
    return (id(dataset) // 16 + worker) % _SLOTS
