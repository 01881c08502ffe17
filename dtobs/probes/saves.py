"""Checkpoints: when torch.save, torch.distributed.checkpoint and safetensors save one, and what they raise.

While the training thread saves to a file its phase is `checkpoint`, in loops that name no phases as well. A loop may
catch the exception and go on, so that nobody hears of it until the checkpoint is needed. Saving through a name that was
imported before the session began is not seen. The first files that are saved whole are written down with their times:
two ranks may have saved to one.

A program may save in another thread while it trains on. Where it hands over the tensors that are trained, and no copies
of them, the optimizer may step while they are written: then the checkpoint is of no step, and nobody hears of it.
"""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from stat import S_ISREG
from typing import Any, TypeAlias

import torch

from dtobs.events import Phase
from dtobs.probes.base import Probe
from dtobs.probes.call_site import CallSites
from dtobs.probes.layout import local_tensor

_MAX_MESSAGE = 300
_SAFETENSORS = "safetensors.torch"
_TOGETHER = "torch.distributed.checkpoint"
"""Who saves a part of its own on each rank, to one path."""
_MOST_WRITTEN = 64
_MOST_TORN, _MOST_TENSORS, _MOST_DEEP = 8, 1 << 14, 6
_Began: TypeAlias = tuple[str, int, BaseException | None, int, str, int, tuple[int, int], int]
"""The function, the line, what exception was handled then, what `Progress.end` needs, the file ("": none), the time,
how many steps were done and which one it is, and of a save in another thread how many of its tensors are trained."""


class Saves(Probe):
    """Marks the phase; writes down each save that raised, and the first after it, at the same line, that did not."""

    name = "saves"
    about_model = False

    def __init__(self) -> None:
        super().__init__()
        self._nested = threading.local()
        self._failures: dict[tuple[str, int], int] = {}
        """By function and line: how many saves have failed there since one did not."""
        self._written = self._torn = 0

    def install(self) -> None:
        self._sites = CallSites(self.context.recorder.meta)
        self._watch(torch, "save", "torch.save")
        if torch.distributed.is_available():
            import torch.distributed.checkpoint as dcp

            self._watch(dcp, "save", "torch.distributed.checkpoint.save")
            self._watch(dcp.state_dict_saver, "save", "torch.distributed.checkpoint.save")  # what async_save calls
        if _SAFETENSORS in sys.modules:
            self._watch(sys.modules[_SAFETENSORS], "save_file", "safetensors.torch.save_file")

    def _watch(self, owner: Any, name: str, said: str) -> None:
        progress = self.context.progress

        def begin(*args: Any, **named: Any) -> _Began:
            outer = getattr(self._nested, "depth", 0)
            self._nested.depth = outer + 1
            target = args[1] if len(args) > 1 else named.get("f")
            memory = isinstance(target, io.BytesIO)  # a copy of something, or a message
            phase = -1 if outer or memory else progress.begin(int(Phase.CHECKPOINT))
            whole = not outer and not said.startswith(_TOGETHER)
            file = os.fsdecode(target) if whole and isinstance(target, (str, os.PathLike)) else ""
            beside = not outer and threading.get_ident() != progress.thread and self._torn < _MOST_TORN
            live = self._live(args[0] if args else next(iter(named.values()), None)) if beside else 0
            now = time.monotonic_ns()
            steps = progress.steps_seen, self.context.step
            return said, self._sites.here(2), sys.exception(), phase, file, now, steps, live

        self.around(owner, name, begin, self._end)

    def _end(self, began: _Began) -> None:
        said, site, before, phase, file, begin_ns, (steps, step), live = began
        self._nested.depth -= 1
        self.context.progress.end(phase)
        error = sys.exception()
        if self._nested.depth:
            return  # one save that is made of others
        failures = self._failures.get((said, site), 0)
        if error is None or error is before:
            done = self.context.progress.steps_seen - steps
            if live and done:
                self._torn += 1
                path = os.path.realpath(file) if file else ""
                self.context.recorder.meta.add("torn", path=path, site=site, live=live, step=step, times=done)
            if file and self._written < _MOST_WRITTEN:
                self._note(file, begin_ns)
            if failures:
                del self._failures[said, site]
                self._say(said, site, 0)
        else:
            self._failures[said, site] = failures + 1
            if failures & (failures + 1) == 0:  # the first, the second, the fourth, …: a disk may stay full for days
                self._say(said, site, failures + 1, error)

    def _live(self, saved: Any) -> int:
        """How many tensors of it lie in the memory of what is trained, or of what an optimizer keeps of that."""
        context = self.context
        trained: list[Any] = list(context.model.parameters()) if context.model is not None else []
        trained = [parameter for parameter in trained if parameter.requires_grad]
        for optimizer in context.watched_optimizers().values():
            trained += (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
            states = [state for state in list(optimizer.state.values()) if isinstance(state, dict)]
            trained += (value for state in states for value in list(state.values()))
        memory = {_place(t) for t in trained if isinstance(t, torch.Tensor) and t.numel() > 1} - {0}
        return sum(_place(tensor) in memory for tensor in islice(_tensors(saved), _MOST_TENSORS))

    def _note(self, file: str, begin_ns: int) -> None:
        try:
            found = Path(file).stat()
        except OSError:
            return
        if not S_ISREG(found.st_mode):
            return  # os.devnull, say
        self._written += 1
        self.context.recorder.meta.add(
            "written",
            path=os.path.realpath(file),
            device=found.st_dev,
            inode=found.st_ino,
            step=self.context.step,
            begin_ns=begin_ns,
            end_ns=time.monotonic_ns(),
        )

    def _say(self, said: str, site: int, failures: int, error: BaseException | None = None) -> None:
        ranks = getattr(error, "failures", None)  # which ranks a distributed save could not do its part on, and why
        if isinstance(ranks, dict) and ranks:
            error = _first_cause(ranks) or error
        text = "" if error is None else f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MAX_MESSAGE]
        self.context.recorder.meta.add(
            "save",
            function=said,
            site=site,
            failures=failures,
            error=text,
            ranks=sorted(int(rank) for rank in ranks) if isinstance(ranks, dict) else [],
            step=self.context.step,
            t_ns=time.monotonic_ns(),
        )


def _tensors(saved: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors in dictionaries, lists and tuples inside one another, and the parameters of modules in them."""
    if isinstance(saved, torch.Tensor):
        yield saved
    elif isinstance(saved, torch.nn.Module):
        yield from list(saved.parameters())
    elif isinstance(saved, (Mapping, list, tuple)) and depth < _MOST_DEEP:
        for each in list(saved.values()) if isinstance(saved, Mapping) else saved:
            yield from _tensors(each, depth + 1)


def _place(tensor: torch.Tensor) -> int:
    """Where a tensor's memory begins; 0 where it has none of its own."""
    try:
        return local_tensor(tensor).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # neither real nor dense
        return 0


def _first_cause(failures: dict[Any, Any]) -> BaseException | None:
    """The exception of the first rank that a CheckpointException names, whose own text is all their tracebacks."""
    first = next(iter(failures.values()))
    cause = first[0] if isinstance(first, tuple) and first else first
    return cause if isinstance(cause, BaseException) else None
