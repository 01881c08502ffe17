"""How often something that reads every parameter is done: a rule that gives every copy of a model the same answer."""

from __future__ import annotations

from collections.abc import Iterable

import torch

BYTES_A_STEP = 4 << 20
BYTES_A_TENSOR = 8 << 10
"""What reading one more tensor costs beside its bytes, in bytes."""
MAX_PERIOD = 200


def period(tensors: Iterable[torch.Tensor], bytes_a_step: int = BYTES_A_STEP) -> int:
    """Every how many steps `tensors` may be read whole, at about `bytes_a_step` a step: 1 for small models.

    Counts the whole tensors, not this rank's shards: uneven shards must not make ranks sample different steps.
    """
    total = sum(t.numel() * t.element_size() + BYTES_A_TENSOR for t in tensors)
    return min(MAX_PERIOD, max(1, -(-total // bytes_a_step)))
