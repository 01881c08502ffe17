"""How likely a difference comes about by chance."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt


def student_tail(t: float, freedom: int) -> float:
    """How likely Student's t of so many degrees of freedom is at least `t`, which is at least 0."""
    at = np.linspace(math.atan(t / math.sqrt(freedom)), math.pi / 2, 4001)
    density: npt.NDArray[np.float64] = np.cos(at) ** (freedom - 1)
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    return float(scale * np.trapezoid(density, at))
