"""Waiting for data, and where each pass over it begins: what a ``torch.utils.data.DataLoader`` iterator says."""

from __future__ import annotations

import weakref
from typing import Any

from torch.utils.data import DistributedSampler, RandomSampler, dataloader

from dtobs.events import Phase
from dtobs.probes.base import Probe
from dtobs.probes.loader_workers import LoaderWorkers

MOST_PASSES = 400
FIRST_SAID, MOST_APART = 16, 1024
"""Steps from the first to which it is said what a batch takes a worker; then each time their number has doubled."""


class Loader(Probe):
    """Names the data phase without a word from the user; a loader of another kind needs ``session.phase("data")``.

    Where a loader that is trained with has a DistributedSampler or a RandomSampler, each pass over it becomes a
    ``pass`` entry: the order in which it will read. A pass belongs to training when the optimizer steps on what it
    gave. Of a stream (an IterableDataset) it is said how many workers read it, and of forked workers what a batch takes
    them.
    """

    name = "loader"
    about_model = False

    def __init__(self) -> None:
        super().__init__()
        self._newest: weakref.ref[Any] | None = None
        self._given: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # batches of each iterator
        self._samplers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._passes = 0
        self._at = -1  # the step in which was looked last
        self._stream: int | None = None  # how many workers read a stream, as far as it was said
        self._workers = LoaderWorkers()
        self._steps, self._said_at = 0, FIRST_SAID  # of the optimizer, and how many there are to be
        self._counted = (0, 0, 0.0)  # id of a dataset, and what was counted of it when that was said

    def install(self) -> None:
        recorder = self.context.recorder
        for undo in self._workers.watch(recorder.run_dir.stacks(recorder.rank, recorder.attempt)):
            self.undo.callback(undo)
        self.around(dataloader._BaseDataLoaderIter, "__next__", self._begin, self.context.progress.end)
        self.context.waits_for_data = self._awaited

    def before_optimizer(self) -> None:
        """Note a pass when its first batch is trained with."""
        iterator = self._newest() if self._newest is not None else None
        if iterator is None:
            return
        self._steps += 1
        if self._steps >= self._said_at:
            self._said_at += min(self._said_at, MOST_APART)
            self._say_workers(iterator)
        given = iterator._num_yielded
        before, self._given[iterator] = self._given.get(iterator, given + 1), given
        at, self._at = self._at, self.context.step
        if before == given and at != self._at and self._stream:
            self._say_stream(0)  # a batch that the loop takes twice says nothing of the workers
        if before <= given:
            return  # the pass goes on; an iterator that is kept between passes counts from 0 again
        if iterator._dataset_kind == dataloader._DatasetKind.Iterable and self._stream is None:
            self._say_stream(iterator._num_workers)
        sampler = getattr(iterator, "_index_sampler", None)
        sampler = getattr(sampler, "sampler", sampler)
        if self._passes < MOST_PASSES:
            order = _order(sampler)
            if order is not None:
                self._passes += 1
                number = self._samplers.setdefault(sampler, len(self._samplers))
                self.context.recorder.meta.add("pass", step=self.context.step, sampler=number, **order)

    def _say_stream(self, workers: int) -> None:
        self._stream = workers
        self.context.recorder.meta.add("process", stream_workers=workers)

    def _say_workers(self, iterator: Any) -> None:
        """Since it was last said."""
        dataset, workers = getattr(iterator, "_dataset", None), int(getattr(iterator, "_num_workers", 0))
        batches, seconds = self._workers.counted(dataset, workers)
        of, batches_before, seconds_before = self._counted
        self._counted = id(dataset), batches, seconds
        if of == id(dataset) and batches > batches_before:
            batches, seconds = batches - batches_before, seconds - seconds_before
        if batches:
            said = {"workers": workers, "batches": batches, "seconds": seconds}
            self.context.recorder.meta.add("process", loader_workers=said)

    def _awaited(self) -> int | None:
        """The process of the worker whose batch is waited for; 0 where none is known, None in other phases."""
        if self.context.phase != Phase.DATA:
            return None
        iterator = self._newest() if self._newest is not None else None
        try:
            return int(iterator._workers[iterator._task_info[iterator._rcvd_idx][0]].pid or 0)  # type: ignore[union-attr]
        except (AttributeError, LookupError, TypeError, ValueError):
            return 0

    def _begin(self, iterator: Any) -> int:
        if self._newest is None or self._newest() is not iterator:
            self._newest = weakref.ref(iterator)
        return self.context.progress.begin(Phase.DATA)


def _order(sampler: Any) -> dict[str, int] | None:
    """What the order of a pass follows from; a RandomSampler has neither seed nor epoch (-1)."""
    if isinstance(sampler, DistributedSampler):
        said = {"shuffles": bool(sampler.shuffle), "seed": int(sampler.seed), "epoch": int(sampler.epoch)}
        return {**said, "replicas": int(sampler.num_replicas), "part": int(sampler.rank), "samples": len(sampler)}
    if isinstance(sampler, RandomSampler) and not sampler.replacement:
        return {"shuffles": True, "seed": -1, "epoch": -1, "replicas": 1, "samples": len(sampler)}
    return None
