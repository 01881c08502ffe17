"""How often something that reads every parameter is done: a rule that gives every copy of a model the same answer."""

from __future__ import annotations

from collections.abc import Iterable

import torch

BYTES_A_STEP = 4 << 20
BYTES_EVERY_STEP = 4 << 20
"""As much is read in every step whatever the budget: a model this small trains in steps that are all alike."""
BYTES_A_TENSOR, BYTES_A_TENSOR_OF_A_DEVICE = 8 << 10, 512 << 10
"""What reading one more tensor costs beside its bytes, in bytes: on a device the host launches kernels for each."""
MAX_PERIOD = 200
LEAST_REDUCED_PERIOD = 10
"""Reduced gradients need not be read more often than that."""


def period(tensors: Iterable[torch.Tensor], bytes_a_step: int = BYTES_A_STEP) -> int:
    """The number of steps between two complete reads of `tensors`, so that they cost about `bytes_a_step` per step.

    It is 1 for small models.

    Counts the whole tensors, not this rank's shards: uneven shards must not make ranks sample different steps.
    """
    total = 0
    for t in tensors:
        beside = BYTES_A_TENSOR if t.device.type in ("cpu", "meta") else BYTES_A_TENSOR_OF_A_DEVICE
        total += t.numel() * t.element_size() + beside
    if total <= min(BYTES_EVERY_STEP, 2 * bytes_a_step):
        return 1
    return min(MAX_PERIOD, max(1, -(-total // bytes_a_step)))


def reduced_period(whole: int) -> int:
    """Every how many steps the reduced gradient is read, where the local one is read whole on every `whole`-th step.

    A multiple of that: the gradient noise scale needs both of one step.
    """
    return whole * -(-LEAST_REDUCED_PERIOD // whole)
