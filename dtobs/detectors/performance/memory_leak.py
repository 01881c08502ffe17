"""memory-leak: what a device has allocated at the end of a step grows with every step, without an end.

What it does: takes the allocated bytes after each step, past the warm-up, in `WINDOWS` windows. A leak grows from each
window to the next, by `GROWTH` and `LEAST_BYTES` in all, and in the second half still by most of what it grew in the
first: caches, longer sequences and a first validation level off. The memory of the host is not judged: mapped files
count in it, and grow while data is read.

Why it hurts: the run ends with an out-of-memory error, hours later.

What to do next: look for tensors that outlive their step: losses summed without `.item()` or `.detach()`, lists of
outputs, hooks that keep activations.
"""

from __future__ import annotations

import numpy as np

from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import bytes_text, ranks_do

WARM_UP, LEAST_STEPS = 8, 96
WINDOWS = 12
GROWTH, LEAST_BYTES = 0.05, 64 << 20
STEADY = 0.6


def memory_leak(view: RunView) -> list[Finding]:
    """At most one finding, with all leaking ranks."""
    leaking: dict[int, tuple[float, int]] = {}
    for rank in view.ranks:
        steps = view.rank_steps(rank)[WARM_UP:]
        held = steps["device_bytes"].astype(np.float64)
        if len(steps) < LEAST_STEPS or not np.isfinite(held).all():
            continue
        # The least of a window: what one step holds and the next does not is no leak.
        levels = np.array([window.min() for window in np.array_split(held, WINDOWS)])
        grown = np.diff(levels)
        total = float(levels[-1] - levels[0])
        halves = float(levels[WINDOWS // 2] - levels[0]), float(levels[-1] - levels[WINDOWS // 2 - 1])
        if (grown > 0).all() and total >= max(GROWTH * levels[0], LEAST_BYTES) and halves[1] >= STEADY * halves[0]:
            leaking[rank] = (total / (len(steps) * (WINDOWS - 1) / WINDOWS), int(steps["step"][0]))
    if not leaking:
        return []
    worst = max(rate for rate, _ in leaking.values())
    return [
        Finding(
            "memory-leak",
            f"{ranks_do(leaking, 'hold')} {bytes_text(worst)} more of device memory after every step",
            tuple(leaking),
            Confidence.LIKELY,
            step=min(step for _, step in leaking.values()),
            evidence=tuple(
                {"what": "growth of allocated memory", "rank": r, "bytes_a_step": rate}
                for r, (rate, _) in sorted(leaking.items())[:16]
            ),
        )
    ]
