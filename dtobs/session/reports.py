"""Numbers that the training code says of itself, and where each goes in the step record and on the page."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy.typing as npt

from dtobs.events import FORMAT_FIELDS
from dtobs.probes.base import Context
from dtobs.probes.deferred import Deferred

_RECORD = {
    "loss": "loss",
    "tokens": "tokens",
    "learning_rate": "learning_rate",
    "gradient_norm": "reduced_norm",
    "loss_scale": "loss_scale",
    "model_flops": "model_flops",
    **{name: name for name in FORMAT_FIELDS},
}
"""Name in ``report()`` → field of the step record."""
_PAGE = {
    "loss": "loss",
    "validation_loss": "validation_loss",
    "learning_rate": "learning_rate",
    "gradient_norm": "reduced_norm",
    "loss_scale": "loss_scale",
    "model_flops": "model_flops",
    "hardware_flops": "hardware_flops",
    "checkpoint_bytes": "checkpoint_bytes",
    "checkpoint_seconds": "checkpoint_seconds",
    **{name: name for name in FORMAT_FIELDS},
}
_SUMMED = ("tokens", "global_tokens")
"""Given per step (or per micro-batch), summed on the page since attach."""
NAMES = tuple(dict.fromkeys((*_RECORD, *_PAGE, *_SUMMED)))


class Reports:
    """Takes reports. A number that is still on a device is fetched without waiting and lands a step later."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.late = Deferred()  #: asked for at the end of each step

    def add(self, values: dict[str, Any]) -> None:
        """Note `values`; a name that nobody knows is kept nowhere."""
        for name, value in values.items():
            if hasattr(value, "detach"):
                value = value.detach()
                if value.device.type not in ("cpu", "meta"):
                    self.late.put(value.reshape(()), partial(self._note_late, name))
                    continue
            self._note(name, float(value))
        self._context.recorder.page.commit()

    def _note_late(self, name: str, value: npt.NDArray[Any]) -> None:
        self._note(name, value.item())

    def _note(self, name: str, value: float) -> None:
        record, page = self._context.progress.reported_record, self._context.recorder.page
        if name in _SUMMED:
            before = page.get(name)
            page.set(**{name: value if before != before else before + value})  # NaN: nothing yet
        if name == "tokens":
            before = float(record["tokens"])
            value = value if before != before else before + value
        if name in _RECORD:
            record[_RECORD[name]] = value
        if name == "loss":
            record["losses"] += 1
        if name in _PAGE:
            page.set(**{_PAGE[name]: value})
        if name in ("checkpoint_bytes", "checkpoint_seconds"):
            page.set(checkpoint_utc=time.time())
