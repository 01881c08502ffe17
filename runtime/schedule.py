"""The learning rate: scaled with the global batch, warmed up, then decayed. Pure functions of the step."""

from __future__ import annotations

import math

from runtime.config import ScheduleConfig


def scaled_peak(learning_rate: float, global_batch: int, config: ScheduleConfig) -> float:
    """The peak learning rate for `global_batch` samples a step.

    Linear scaling keeps the expected update an epoch the same (Goyal et al. 2017); the square root keeps its
    variance (Krizhevsky 2014, better with Adam at large batches).
    """
    ratio = global_batch / config.reference_batch
    if config.scaling == "linear":
        return learning_rate * ratio
    return learning_rate * math.sqrt(ratio) if config.scaling == "sqrt" else learning_rate


def multiplier(step: int, steps: int, config: ScheduleConfig) -> float:
    """The fraction of the peak at `step` (1 … steps).

    Step 1 is 1/warmup, step `warmup` is the peak, step `steps` is `floor` (cosine and wsd).
    """
    if step < config.warmup:
        return step / config.warmup
    if config.kind == "constant":
        return 1.0
    start = config.warmup
    if config.kind == "wsd":
        start = max(start, steps - round(config.decay * steps))
    if step <= start:
        return 1.0
    progress = min(1.0, (step - start) / max(1, steps - start))
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if config.kind == "cosine" else 1 - progress
    return config.floor + (1 - config.floor) * shape
