"""The idle share of a pipeline beside (p−1)/(m+p−1): torch's schedules with stages that sleep, watched by dtobs.

The replay takes the measured durations and no time for messages, which is what the formula is about; what was measured
also has the messages and whatever else the machine did.
"""

from __future__ import annotations

from pathlib import Path

from dtobs.recording.view import load_run
from dtobs.timeline.bubble import latest
from tests.harness import run_ranks
from tests.multiprocess.pipeline_programs import MICRO_BATCHES, train


def measure(
    folder: Path, schedule: str, ranks: int, seconds: float = 0.03
) -> tuple[int, float, float, float]:
    """Micro-batches, then the shares measured, replayed and ideal, of the last of four steps."""
    run_ranks(train, ranks, folder, schedule, seconds, 4, timeout=300)
    bubble = latest(load_run(folder))
    assert bubble is not None and bubble.replayed is not None and bubble.ideal is not None
    return MICRO_BATCHES, bubble.measured, bubble.replayed, bubble.ideal
