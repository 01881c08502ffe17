"""Numbers that the training code says of itself, and where each goes in the step record and on the page."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from dtobs.events import FORMAT_FIELDS
from dtobs.probes.base import Context
from dtobs.probes.progress import Progress

if TYPE_CHECKING:
    import torch

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
    "checkpoint_bytes": "checkpoint_bytes",
    "checkpoint_seconds": "checkpoint_seconds",
    **{name: name for name in FORMAT_FIELDS},
}
_SUMMED = ("tokens", "global_tokens")
"""Given per step (or per micro-batch), summed on the page since attach."""
NAMES = tuple(dict.fromkeys((*_RECORD, *_PAGE, *_SUMMED)))


class Reports:
    """Takes reports. A number that is still on a device is fetched without waiting and lands a step later."""

    def __init__(self, context: Context, progress: Progress) -> None:
        self._context = context
        self._progress = progress
        self._late: list[tuple[str, torch.Tensor, torch.cuda.Event]] = []

    def take(self, values: dict[str, Any]) -> None:
        """Note `values`; a name that nobody knows is kept nowhere."""
        for name, value in values.items():
            if hasattr(value, "detach"):
                if value.device.type == "cuda":
                    self._fetch(name, value)
                    continue
                value = value.detach().item()
            self._note(name, float(value))
        self._context.recorder.page.commit()

    def poll(self) -> None:
        """Note what has arrived from a device since."""
        waiting, self._late = self._late, []
        for name, copy, event in waiting:
            if event.query():  # type: ignore[no-untyped-call]
                self._note(name, float(copy.item()))
            else:
                self._late.append((name, copy, event))

    def _note(self, name: str, value: float) -> None:
        record, page = self._progress.reported_record, self._context.recorder.page
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

    def _fetch(self, name: str, value: torch.Tensor) -> None:
        import torch

        copy = torch.empty((), dtype=value.dtype, pin_memory=True)
        copy.copy_(value.detach().reshape(()), non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(value.device))
        self._late.append((name, copy, event))
