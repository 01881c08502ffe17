"""Since when a gradient has moved each parameter: some number in it has grown then.

Weight decay alone only shrinks: so move layers whose gradient vanishes and experts that get no token, and they move
alike to the last bit on ranks that have nothing to do with each other. Who looks for copies by their being alike
(`detectors.silent.learned_copies`) looks only at what has been moved.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

SAMPLE, LOOKS = 256, 64
"""Numbers of a tensor that are looked at, spread over it, and how often."""


class FirstMoves:
    """Some rows of a parameter table: `since` has the step of each that was seen to have moved."""

    def __init__(self, rows: Iterable[int]) -> None:
        self.resting = sorted(rows)
        self.since: dict[int, int] = {}
        self._last: dict[int, npt.NDArray[np.float32]] = {}
        self._looks = dict.fromkeys(self.resting, 0)

    def add(self, step: int, row: int, magnitudes: npt.NDArray[np.float32]) -> bool:
        """What `sample` gives of a row after a step; whether that is the first time that it has moved."""
        if row not in self._looks:
            return False  # of a look that was under way
        last, self._last[row] = self._last.get(row), magnitudes.copy()
        self._looks[row] += 1
        moved = last is not None and last.shape == magnitudes.shape and bool((magnitudes > last).any())
        if moved:
            self.since[row] = step
        if moved or self._looks[row] >= LOOKS:
            self.resting.remove(row)
            del self._last[row], self._looks[row]
        return moved


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """float32[at most `SAMPLE`]: magnitudes of some numbers of a local tensor, on its device."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE].abs().float()
