"""Uneven inputs under ``Join``: a rank that has run out takes part in the steps of the others without any of its own.

Those steps count in its numbering. Without that, the ranks would number the same step differently from the second epoch
on, and every comparison of ranks by step would compare different steps.

Private torch: ``Join._get_num_nonjoined_procs``, which a rank calls once for each batch of the others and once more at
the end; tried with 2.13.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.algorithms.join import Join

from dtobs.probes.base import Probe
from dtobs.recording.page import INDEX


class Joins(Probe):
    """Counts the batches that a rank takes part in after its own have ended."""

    name = "joins"
    about_model = False

    def __init__(self) -> None:
        super().__init__()
        self._asked = 0

    def install(self) -> None:
        """Wrap the end of the context and the question of how many ranks go on."""
        self.around(Join, "__exit__", self._leave, self._left)
        self.around(Join, "_get_num_nonjoined_procs", self._ask, lambda _: None)

    def _leave(self, *_: Any) -> bool:
        self._asked = 0
        return True

    def _ask(self, *_: Any) -> None:
        self._asked += 1

    def _left(self, _: bool) -> None:
        context = self.context
        for rewritten in context.on_rewritten:
            rewritten()
        batches = max(0, self._asked - 1)
        context.progress.take_part(batches // max(1, context.recorder.page.ints[INDEX["micro_batches"]]))
