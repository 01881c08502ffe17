"""How long the worker processes of a DataLoader take for a batch, and where they are when `lines` asks.

Each counts in memory that it shares with the process that trains, as it inherits both that memory and the wrapped
``fetch`` when it is forked; from its first batch on it prints its stack when asked. Of a worker that is spawned
nothing is counted.

Private torch: ``torch.utils.data._utils.fetch._MapDatasetFetcher`` and ``_IterableDatasetFetcher``; tried with 2.13.
Without them nothing is known of any.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import _utils, get_worker_info

from dtobs.host.own_stack import print_when_asked
from dtobs.probes import patches
from dtobs.probes.stacks import LOOK_SIGNAL

_SLOTS = 256
_KEY, _BATCHES, _NANOSECONDS = range(3)


class LoaderWorkers:
    """A table in shared memory, a row for each worker of each loader; of two that meet in a row the later one stays."""

    def __init__(self) -> None:
        self._table = np.frombuffer(mmap.mmap(-1, _SLOTS * 3 * 8), np.int64).reshape(_SLOTS, 3)

    def watch(self, stacks: Path) -> list[patches.Undo]:
        """Have the workers that are forked from now on count, and print into the file `stacks`; undoes each hook."""
        self._stacks = str(stacks.absolute())
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
        table, stacks, answers = self._table, self._stacks, False

        def fetch(*args: Any) -> Any:
            nonlocal answers
            worker = get_worker_info()  # None in the process that trains
            if worker is not None and not answers:
                answers = True
                with contextlib.suppress(ValueError, OSError):  # in a thread of the worker's
                    print_when_asked(LOOK_SIGNAL, stacks)
            begin = time.perf_counter_ns()
            batch = original(*args)
            if worker is not None:
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
