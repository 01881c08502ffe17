"""Checkpoints that could not be saved: what torch.save, torch.distributed.checkpoint and safetensors raise.

A loop may catch the exception and go on, so that nobody hears of it until the checkpoint is needed. Saving through a
name that was imported before the session began is not seen.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import torch

from dtobs.probes.base import Probe
from dtobs.probes.call_site import CallSites

_MAX_MESSAGE = 300
_SAFETENSORS = "safetensors.torch"


class Saves(Probe):
    """Writes down each save that raised, and the first one after it, at the same line, that did not."""

    name = "saves"
    about_model = False

    def __init__(self) -> None:
        super().__init__()
        self._nested = threading.local()
        self._failures: dict[tuple[str, int], int] = {}
        """By function and line: how many saves have failed there since one did not."""

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
        def begin(*_args: Any, **_named: Any) -> tuple[str, int, BaseException | None]:
            self._nested.depth = getattr(self._nested, "depth", 0) + 1
            return said, self._sites.here(2), sys.exception()

        self.around(owner, name, begin, self._end)

    def _end(self, began: tuple[str, int, BaseException | None]) -> None:
        said, site, before = began
        self._nested.depth -= 1
        error = sys.exception()
        if self._nested.depth:
            return  # one save that is made of others
        failures = self._failures.get((said, site), 0)
        if error is None or error is before:
            if failures:
                del self._failures[said, site]
                self._say(said, site, 0)
        else:
            self._failures[said, site] = failures + 1
            if failures & (failures + 1) == 0:  # the first, the second, the fourth, …: a disk may stay full for days
                self._say(said, site, failures + 1, error)

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


def _first_cause(failures: dict[Any, Any]) -> BaseException | None:
    """The exception of the first rank that a CheckpointException names, whose own text is all their tracebacks."""
    first = next(iter(failures.values()))
    cause = first[0] if isinstance(first, tuple) and first else first
    return cause if isinstance(cause, BaseException) else None
