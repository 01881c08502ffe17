"""Digests of the random generators' states at the end of each step.

Ranks on different data must draw different numbers (dropout), ranks on the same data the same ones. What a job intends
is its own declaration: ``session.policy(...)``.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import xxhash

from dtobs.probes.base import Probe

SLOW_PERIOD = 16


class GeneratorProbe(Probe):
    """Fills in ``rng_torch`` and ``rng_device`` (a few µs a step); on every `SLOW_PERIOD`-th step the others too."""

    name = "generators"

    def step_end(self) -> None:
        """The states as the step leaves them; a generator that the step did not use keeps its digest."""
        record = self.context.record
        if self.context.step % SLOW_PERIOD == 0:
            record["rng_python"] = _python()
            record["rng_numpy"] = _numpy()
        record["rng_torch"] = _torch(torch.get_rng_state())
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # what is not available never is
            # The state of a device's generator is kept on the host (seed and offset): reading it waits for nothing.
            record["rng_device"] = _torch(torch.cuda.get_rng_state())


def _python() -> int:
    """Hashes of tuples of int do not depend on PYTHONHASHSEED."""
    return (hash(random.getstate()) & 0xFFFFFFFFFFFFFFFF) or 1


def _numpy() -> int:
    state: Any = np.random.get_state(legacy=True)
    return xxhash.xxh3_64_intdigest(state[1].tobytes() + int(state[2]).to_bytes(4, "little")) or 1


def _torch(state: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(state.numpy().data) or 1
