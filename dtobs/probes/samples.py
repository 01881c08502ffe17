"""The data ledger: a digest of each sample that a rank trains on, whatever loader it came from.

A sample is a row of the batch: what `probes.inputs` is given, along the first dimension. A digest is a sum over a few
words spread over the row, with a random weight for each place: enough to tell samples apart, in a few dozen µs a batch.
How many steps are looked at follows from that and from what a step takes (`probes.rotation`).
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dtobs.probes.base import Probe
from dtobs.probes.digests import words
from dtobs.probes.host_memory import host_memory
from dtobs.probes.layout import local_tensor
from dtobs.probes.rotation import Rotation
from dtobs.recording.laws import SAMPLES, SAMPLES_EACH

MOST_ROWS = 256
"""Of one micro-batch."""
MOST_TENSORS = 4
_WORDS = 64
_WEIGHTS = np.random.default_rng(20_261_122).integers(0, 1 << 63, _WORDS, np.uint64) * np.uint64(2) + np.uint64(1)
_on_device: dict[torch.device, torch.Tensor] = {}
_LAST = np.uint64(0xD6E8FEB86659FD93)


class SampleProbe(Probe):
    """Writes the ring SAMPLES."""

    name = "samples"

    def __init__(self) -> None:
        super().__init__()
        self._rotation = Rotation(0)
        self._looking = False
        self._micro = 0
        self._record = np.zeros((), SAMPLES.dtype)

    def install(self) -> None:
        """Listen to what the probe of the inputs is given."""
        self._rotation = Rotation(1, everything=self.context.levels.get(self.name) == "all")
        listen = self.guard(self._take)
        self.context.on_inputs.append(listen)
        self.undo.callback(self.context.on_inputs.remove, listen)
        self._looking = True

    def step_begin(self) -> None:
        """Look at this step or leave it out."""
        self._looking, self._micro = bool(self._rotation.rows(self.context.step)), 0

    def _take(self, tensors: list[torch.Tensor]) -> None:
        if not self._looking:
            return
        begin = time.perf_counter_ns()
        batch = _batch(tensors)
        if batch:
            step, micro, rows = self.context.step, self._micro, batch[0].shape[0]
            if batch[0].is_cpu:
                self._write(step, micro, rows, host_rows(batch))
            else:
                self.late.put(
                    device_rows(batch), lambda found: self._write(step, micro, rows, _mixed(found.view(np.uint64)))
                )
        self._micro += 1
        self._rotation.spent(time.perf_counter_ns() - begin)

    def _write(self, step: int, micro: int, rows: int, digests: npt.NDArray[np.uint64]) -> None:
        ring, record = self.context.recorder.law(SAMPLES), self._record
        record["step"], record["micro"], record["rows"] = step, micro, rows
        for first in range(0, len(digests), SAMPLES_EACH):
            part = digests[first : first + SAMPLES_EACH]
            record["first"], record["count"] = first, len(part)
            record["digest"][: len(part)] = part
            record["digest"][len(part) :] = 0
            ring.append(record)


def host_rows(batch: list[torch.Tensor]) -> npt.NDArray[np.uint64]:
    """u64[rows]: a digest of each row over all tensors; 0 where a row is one value throughout and says nothing."""
    total = np.zeros(min(MOST_ROWS, batch[0].shape[0]), np.uint64)
    varied = np.zeros(len(total), bool)
    for number, tensor in enumerate(batch):
        some = _some(tensor)
        flat = host_memory(some)
        values = flat.view(f"u{flat.dtype.itemsize}").astype(np.uint64)
        total += (values * _WEIGHTS[: values.shape[1]]).sum(axis=1, dtype=np.uint64) * np.uint64(2 * number + 1)
        varied |= (values != values[:, :1]).any(axis=1)
    return np.where(varied, _mixed(total), np.uint64(0))


def device_rows(batch: list[torch.Tensor]) -> torch.Tensor:
    """int64[rows] on the device: what `_mixed` makes digests of; rows of one value count like others."""
    device = batch[0].device
    if device not in _on_device:
        _on_device[device] = torch.from_numpy(_WEIGHTS.view(np.int64)).to(device)
    weights = _on_device[device]
    total = torch.zeros(min(MOST_ROWS, batch[0].shape[0]), dtype=torch.int64, device=device)
    for number, tensor in enumerate(batch):
        values = _some(tensor).to(torch.int64)
        total += (values * weights[: values.shape[1]]).sum(1) * (2 * number + 1)
    return total


def _mixed(sums: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    mixed = (sums ^ (sums >> np.uint64(32))) * _LAST
    return np.asarray(mixed | np.uint64(1))


def _some(tensor: torch.Tensor) -> torch.Tensor:
    """integers[rows, at most _WORDS], spread evenly over each of the first rows."""
    held = tensor[:MOST_ROWS]
    flat = held.reshape(held.shape[0], -1)
    stride = -(-flat.shape[1] // _WORDS)
    chosen = flat[:, ::stride].contiguous()
    return words(chosen).view(held.shape[0], -1)[:, :_WORDS].contiguous()


def _batch(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """What this rank has of the tensors with a row for each sample: those with as many rows as the largest one."""
    wide = [t for t in map(local_tensor, tensors) if t.ndim > 1 and t.shape[0] and t.numel() > t.shape[0]]
    if not wide:
        return []
    largest = max(wide, key=lambda t: t.numel())
    same: list[Any] = [t for t in wide if t.shape[0] == largest.shape[0] and t.device == largest.device]
    return same[:MOST_TENSORS]
